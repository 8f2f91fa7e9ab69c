-- The generic cell rate algorithm, as bare as it gets: one instant per key, in microseconds.
local interval, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local due = math.max(tonumber(redis.call('GET', KEYS[1]) or now), now)
local wait = due - burst - now
if wait > 0 then
  return { 0, wait }
end
local next_due = due + interval
redis.call('SET', KEYS[1], string.format('%.0f', next_due), 'PX', math.ceil((next_due - now) / 1000) + 1)
return { 1, 0 }
