-- Asks for one request to be admitted. Writes nothing that would have to be given back unless it is.

local token, process = ARGV[15], ARGV[16]
-- Server time after which nobody waits for the answer any more; zero is none.
local not_after = tonumber(ARGV[17])
-- How long the request has waited, and how long it will.
local waited, budget = tonumber(ARGV[18]), tonumber(ARGV[19])
-- Leases that this process was handed and has taken up. One that is over by now stays so.
for i = 20, #ARGV do
  confirm(ARGV[i])
end

if not_after > 0 and now > not_after then
  return answer('late')
end

local function admitted(at, binding)
  if cap == 0 then
    changed.a = token
  end
  return answer('admitted', text(at), binding and 1 or 0)
end

-- The same question once more: its answer was lost.
if stored[6] == token or (cap > 0 and read(leases, 'ZSCORE', leases, token)) then
  return admitted(now, false)
end

local at, reason = next_send()
local full = is_full()
if full and learned and budget > 0 then
  -- Somebody waits, and may be about to learn how much the host takes at once.
  watch(in_flight())
end

local free = not full and at <= now
if claim_ttl > 0 and not (free and read(tickets, 'ZCARD', tickets) == 0) and at - now <= budget then
  -- A permit is on its way to this process, for the request that asks here: it draws no second ticket.
  if is_claimed_by(process) then
    return answer('claim')
  end
  redis.call('ZADD', tickets, text(now - waited), process)
  keep(tickets, math.max(lease_ttl, SLACK))
  local mine, binding = hand_over(process, token)
  if mine then
    return admitted(mine, binding)
  end
  if budget == 0 then
    redis.call('ZREM', tickets, process)
  end
  at, reason = next_send()
elseif free then
  lease(token, lease_ttl)
  return admitted(now, record_send(now))
end

if at > now then
  return answer('wait', text(at), reason)
end
if claim_ttl == 0 and budget > 0 then
  seek(process)
end
return answer('full', others(process))
