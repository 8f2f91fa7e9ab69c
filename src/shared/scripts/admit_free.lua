-- The way of nearly every request, in front of everything else: nothing is known of its host but how many are in flight.
-- Whatever is not as simple as that goes on below.
do
  local cap, quota, min_delay = tonumber(ARGV[1]), ARGV[5], ARGV[3]
  if cap > 0 and quota == '0' and min_delay == '0' and #ARGV == 19 and redis.call('EXISTS', KEYS[1], KEYS[4]) == 0 then
    local clock = redis.call('TIME')
    local micros = clock[1] * 1000000 + clock[2]
    local now = math.floor(micros / 1000)
    local not_after = tonumber(ARGV[17])
    local count = redis.pcall('ZCARD', KEYS[2])
    if type(count) == 'number' and count < cap and (not_after == 0 or now <= not_after) then
      local ttl = tonumber(ARGV[2])
      -- Added before: the same question once more, because its answer was lost.
      local added = redis.call('ZADD', KEYS[2], string.format('%.0f', now + ttl), ARGV[15])
      if redis.call('PTTL', KEYS[2]) < ttl then
        redis.call('PEXPIRE', KEYS[2], string.format('%.0f', ttl + 60000))
      end
      return { string.format('%.0f', micros), count + added, 0, '', 'admitted', string.format('%.0f', now), 0 }
    end
  end
end

