-- What is done to a host from outside the way of a request.

local operation = ARGV[15]

if operation == 'penalize' then
  pace = rules()
  pace.penalize(watch(0), now, tonumber(ARGV[16]))
  changed.p = true
elseif operation == 'clear' then
  -- What counts towards limits of the user's own is kept.
  redis.call('HDEL', state, 'p')
  p, changed.p = nil, nil
  clears = clears + 1
  changed.x = text(clears)
  redis.call('PUBLISH', channel .. 'all', 'clear ' .. text(clears) .. ' ' .. state)
elseif operation == 'merge' then
  -- Learnt by a process that could not reach us: its instants, by its estimate of our clock.
  local other = rules().unpack(ARGV[16])
  if other then
    local shift = now - tonumber(ARGV[17])
    for _, field in ipairs({ 'hold_until', 'spaced_until', 'warm_until', 'last_throttle', 'last_ok', 'burst_sent', 'run_sent' }) do
      if other[field] > 0 then
        other[field] = math.max(other[field] + shift, 1)
      end
    end
    pace.clamp(other, now)
    p = pace.merge(p, other, now)
    changed.p = true
  end
elseif operation == 'resend' then
  -- A retry below the gate sends once more, in so many milliseconds.
  record_send(now + tonumber(ARGV[16]))
elseif operation == 'confirm' then
  confirm(ARGV[16])
elseif operation == 'leave' then
  read(tickets, 'ZREM', tickets, ARGV[16])
end

if claim_ttl > 0 and operation ~= 'look' then
  hand_over()
end
local at, reason = next_send()
if cap > 0 then
  in_flight()
end
return answer(text(at), reason)
