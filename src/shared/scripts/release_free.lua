-- The way of nearly every request, in front of everything else: nothing is known of its host, and the response has said
-- nothing that would have to be remembered.
if
  ARGV[15] ~= '' and ARGV[17] ~= 'throttled' and ARGV[23] == '-1' and ARGV[4] == '0'
  and redis.call('EXISTS', KEYS[1], KEYS[4], KEYS[5]) == 0
then
  local removed = redis.pcall('ZREM', KEYS[2], ARGV[15])
  if type(removed) == 'number' then
    local clock = redis.call('TIME')
    return { string.format('%.0f', clock[1] * 1000000 + clock[2]), 0, 0, '', tonumber(ARGV[1]) == 0 and 1 or removed, 0 }
  end
end

