-- One host: what is stored of it, and when its next send may go. Put behind pace.lua and in front of every script.
--
-- Instants are integer milliseconds of the server's own clock; zero is never. All keys come in KEYS and carry one hash
-- tag. Every key that is written gets a time to live that is at least as long as what it stores; a key of another type,
-- which only somebody else can have written, is dropped.

local clock = redis.call('TIME')
local micros = clock[1] * 1000000 + clock[2]
local now = math.floor(micros / 1000)

local state, leases, sends, tickets, seekers = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]

-- The rules of whoever asks. Replicas may differ: each brings its own, so the strictest one holds its own requests.
local cap, lease_ttl = tonumber(ARGV[1]), tonumber(ARGV[2])
local min_delay, from_completion = tonumber(ARGV[3]), ARGV[4] == '1'
local quota, window = tonumber(ARGV[5]), tonumber(ARGV[6])
local learned = ARGV[7] == '1'
local max_cooldown = tonumber(ARGV[9])
-- Zero without the fair queue.
local claim_ttl, horizon = tonumber(ARGV[12]), tonumber(ARGV[13])
local channel = ARGV[14]

-- How long what was learnt of a host is kept after its last use.
local REMEMBERED = 7 * 86400000
-- Times to live are renewed when this much of them is gone, not every time.
local SLACK = 60000

local function keep(key, ttl)
  if redis.call('PTTL', key) < ttl then
    redis.call('PEXPIRE', key, string.format('%.0f', ttl + SLACK))
  end
end

local function read(key, ...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    if not string.find(reply.err, 'WRONGTYPE', 1, true) then
      error(reply.err, 0)
    end
    redis.call('DEL', key)
    reply = redis.call(...)
  end
  return reply
end

-- What is stored where a number belongs, if it is one that can be counted with: "nan" is a number to Lua.
local MOST = 2 ^ 50

local function number(stored)
  local n = stored and string.match(stored, '^%d+$') and tonumber(stored)
  return n and n <= MOST and n or nil
end

local function text(n)
  return string.format('%.0f', n)
end

-- --- what is stored ---------------------------------------------------------------------------------------------------

local stored = read(state, 'HMGET', state, 'p', 's', 'c', 'w', 'x', 'a')
local clears = number(stored[5]) or 0
local pace, p
local changed = {}

-- A send may be booked this far ahead; an instant beyond that lies in the future of a clock that was set back, and counts
-- as now.
local booked = now + horizon

local function past(field, value)
  local at = number(value) or 0
  if at > booked then
    changed[field] = text(now)
    return now
  end
  return at
end

local last_send, last_completion = past('s', stored[2]), past('c', stored[3])
local widest = math.max(number(stored[4]) or 0, quota > 0 and window or 0)

local function rules()
  pace = pace or load_pace({
    learned = learned,
    base = tonumber(ARGV[8]),
    max = max_cooldown,
    spacing = tonumber(ARGV[10]),
    warm = tonumber(ARGV[11]),
  })
  return pace
end

if stored[1] then
  p = rules().unpack(stored[1])
  if p and pace.clamp(p, booked) then
    changed.p = true
  end
end

-- What is known of the host; recording begins if there was nothing.
local function watch(just_sent)
  if not p then
    p = rules().begin(now, just_sent)
    changed.p = true
  end
  return p
end

local packed

-- The pace as it is stored: packed anew after a send, and not before everything else has been done to it.
local function pack()
  packed = packed or (changed.p and pace.pack(p) or p and stored[1] or '')
  return packed
end

local function save()
  local fields = {}
  local packed = pack()
  if changed.p then
    changed.p = packed
  end
  for field, value in pairs(changed) do
    fields[#fields + 1] = field
    fields[#fields + 1] = value
  end
  if #fields == 0 then
    return packed
  end
  redis.call('HSET', state, unpack(fields))
  local ttl = math.max(min_delay, widest)
  if clears > 0 then
    -- As long as anybody may remember a cooldown from before.
    ttl = math.max(ttl, max_cooldown)
  end
  if p then
    local forgotten = p.gap == 0 and not p.short_hints and not p.quota_lies
    local live = math.max(p.hold_until, p.spaced_until, p.warm_until) - now
    ttl = forgotten and math.max(ttl, live) or REMEMBERED
  end
  keep(state, ttl)
  return packed
end

-- --- leases -----------------------------------------------------------------------------------------------------------

-- A lease says itself how long it may last at most, in case the clock was set back.
local function lasts(lease)
  return number(string.match(lease, '%.(%d+)$')) or lease_ttl
end

-- How many leases there are, once that was asked for, and whether those that have ended are gone.
local counted, is_exact

local function at_most_in_flight()
  counted = counted or read(leases, 'ZCARD', leases)
  return counted
end

-- How many are in flight, those excepted whose lease has ended.
local function in_flight()
  if not is_exact then
    is_exact = true
    redis.call('ZREMRANGEBYSCORE', leases, '-inf', text(now))
    local late = redis.call('ZRANGEBYSCORE', leases, text(now + lease_ttl + 1), '+inf', 'WITHSCORES')
    for i = 1, #late, 2 do
      local most = now + lasts(late[i])
      if (number(late[i + 1]) or MOST) > most then
        redis.call('ZADD', leases, text(most), late[i])
      end
    end
    counted = redis.call('ZCARD', leases)
  end
  return counted
end

local function is_full()
  if cap == 0 then
    return false
  end
  local most = p and pace.is_serial(p, now) and 1 or cap
  -- Whether some of them have ended matters only if they are too many.
  return at_most_in_flight() >= most and in_flight() >= most
end

-- --- when the next one goes -------------------------------------------------------------------------------------------

local trimmed = false

-- The sends that count towards anybody's quota, oldest first.
local function trim()
  if trimmed or widest == 0 then
    return
  end
  trimmed = true
  local newest = number(read(sends, 'LINDEX', sends, -1) or '0')
  if not newest or newest > booked then
    local all = redis.call('LRANGE', sends, 0, -1)
    redis.call('DEL', sends)
    for _, at in ipairs(all) do
      redis.call('RPUSH', sends, text(math.min(number(at) or now, now)))
    end
    keep(sends, widest)
  end
  local oldest = redis.call('LINDEX', sends, 0)
  while oldest and (number(oldest) or 0) + widest <= now do
    redis.call('LPOP', sends)
    oldest = redis.call('LINDEX', sends, 0)
  end
end

local function quota_until()
  if quota == 0 then
    return 0
  end
  trim()
  local oldest = redis.call('LINDEX', sends, -quota)
  return oldest and (number(oldest) or now) + window or 0
end

-- The earliest instant of the next send, and what is in its way: the latest of all that apply, never a sum.
local function next_send()
  local at, reason = 0, 'spacing'
  if p then
    at = pace.ready(p)
    reason = p.hold_until > now and 'cooldown' or 'spacing'
  end
  if min_delay > 0 then
    local from = from_completion and last_completion or last_send
    if from > 0 and from + min_delay > at then
      at, reason = from + min_delay, 'spacing'
    end
  end
  local until_quota = quota_until()
  if until_quota > at then
    at, reason = until_quota, 'quota'
  end
  return at, reason
end

-- --- sends ------------------------------------------------------------------------------------------------------------

-- A request goes out at this instant. Gives back whether it was the learned gap that kept it.
local function record_send(at)
  if min_delay > 0 or stored[2] then
    last_send = math.max(last_send, at)
    changed.s = text(last_send)
  end
  if from_completion and min_delay > 0 then
    -- Should its process die, it has left the right distance behind.
    last_completion = math.max(last_completion, at)
    changed.c = text(last_completion)
  end
  if widest > 0 then
    trim()
    redis.call('RPUSH', sends, text(at))
    keep(sends, widest)
    changed.w = text(widest)
  end
  local binding = false
  if p then
    binding = pace.sent(p, at)
    changed.p = true
    packed = nil
  end
  return binding
end

local function lease(token, ttl)
  if cap > 0 then
    counted = at_most_in_flight() + redis.call('ZADD', leases, text(now + ttl), token)
    keep(leases, math.max(ttl, lease_ttl))
  end
end

-- A lease that was handed over is in use. It may be over by now.
local function confirm(token)
  read(leases, 'ZADD', leases, 'XX', text(now + lasts(token)), token)
end

-- --- the fair queue ---------------------------------------------------------------------------------------------------

-- Whether a permit was handed to this process that it has not taken up yet.
local function is_claimed_by(process)
  local unclaimed = redis.call('ZRANGEBYSCORE', leases, text(now), text(now + claim_ttl + horizon))
  for _, token in ipairs(unclaimed) do
    if string.sub(token, 1, #process + 1) == process .. '.' and string.match(token, 'g%.%d+$') then
      return true
    end
  end
  return false
end

-- Gives free slots to those who have waited longest, one ticket per process: a lease that has to be claimed, and word of
-- it. A slot that is free within the horizon is given at once, with the instant of the send; `process`, who is asking,
-- gets its own under `token` and without claiming.
local function hand_over(process, token)
  while not is_full() do
    local first = read(tickets, 'ZRANGE', tickets, 0, 0)[1]
    local at = math.max(next_send(), now)
    if not first or at > now + horizon then
      return
    end
    redis.call('ZREM', tickets, first)
    local binding = record_send(at)
    if first == process then
      lease(token, lease_ttl + at - now)
      return at, binding
    end
    local claim = first .. '.' .. text(redis.call('HINCRBY', state, 'n', 1)) .. 'g.' .. text(lease_ttl)
    lease(claim, claim_ttl + at - now)
    changed.n = redis.call('HGET', state, 'n')
    redis.call('PUBLISH', channel .. first, table.concat({
      'grant', text(micros), text(at), binding and '1' or '0', text(clears), state, claim, pack(),
    }, ' '))
  end
end

-- Without the fair queue, whoever finds all permits taken leaves word of it for so long.
local SEEKING = 500

local function seek(process)
  read(seekers, 'ZADD', seekers, text(now), process)
  redis.call('ZREMRANGEBYSCORE', seekers, '-inf', text(now - SEEKING))
  keep(seekers, SEEKING)
end

-- How many other processes have been looking for a permit lately.
local function others(process)
  local count = read(seekers, 'ZCOUNT', seekers, text(now - SEEKING), '+inf')
  if count > 0 and redis.call('ZSCORE', seekers, process) then
    count = count - 1
  end
  return count
end

-- Every answer: the clock in microseconds, which tells two answers of a millisecond apart, what is in flight, how often the host was cleared, and its pace.
local function answer(...)
  local packed = save()
  local count = cap > 0 and at_most_in_flight() or 0
  return { text(micros), count, clears, packed, ... }
end
