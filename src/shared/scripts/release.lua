-- A request is over, or its response head has something to say: gives its lease back, and takes the report.

local token = ARGV[15]
-- It went out: what is measured from its end counts.
local was_sent = ARGV[16] == '1'
local outcome = ARGV[17]
-- Of its send: when, whether the learned gap was what kept it, and whether it was refused softly before.
local sent_at = tonumber(ARGV[18])
local ticket = sent_at > 0 and { at = sent_at, binding = ARGV[19] == '1', again = ARGV[20] == '1' } or nil
local hint = tonumber(ARGV[21])
local remaining, reset = tonumber(ARGV[23]), tonumber(ARGV[24])

local held = true
if token ~= '' and cap > 0 then
  held = read(leases, 'ZREM', leases, token) == 1
end
if was_sent and from_completion and min_delay > 0 then
  last_completion = math.max(last_completion, now)
  changed.c = text(last_completion)
end

if outcome == 'throttled' then
  watch(0)
  pace.throttled(p, now, ticket, {
    hint = hint >= 0 and hint or nil,
    soft = ARGV[22] == '1',
    again = ticket ~= nil and ticket.again,
    within_quota = remaining > 0,
    used_up = remaining == 0,
  })
  changed.p = true
else
  if outcome == 'success' and p then
    pace.succeeded(p, ticket)
    changed.p = true
  end
  if remaining >= 0 then
    if remaining <= (cap > 0 and in_flight() or 0) then
      watch(0)
      pace.used_up(p, now, reset)
      changed.p = true
    elseif outcome == 'success' and p then
      pace.paced_by_server(p)
      changed.p = true
    end
  end
end
if p and pace.is_cold(p, now) and outcome == 'success' and at_most_in_flight() == 0 then
  -- Nobody waits for this host: there is nothing to remember of it.
  redis.call('HDEL', state, 'p')
  p, changed.p = nil, nil
end

local looking = 0
if claim_ttl > 0 then
  hand_over()
elseif token ~= '' then
  looking = others(string.match(token, '^[^.]*'))
end
return answer(held and 1 or 0, looking)
