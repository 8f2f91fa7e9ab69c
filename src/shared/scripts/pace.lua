-- The rules of pacing once more, for the server that all processes share: src/pace/reactive.rs, src/pace/learned.rs, and
-- how src/pace/memory.rs brings a state into its range. Function by function in the order of those files, which say why
-- each rule is as it is; a property test keeps both equal at every step.
--
-- A state `p` has the fields of `Learned`; reactive pacing uses the first five and leaves the others alone. Instants are
-- integer milliseconds of the server's clock, zero is never. Every number is an integer, and what Rust saturates is
-- saturated here.

-- `rules` are learned (or else reactive) and, in milliseconds, base, max, spacing and warm. All of it is in a function, so
-- that a script which meets a host without a pace does not pay for what it does not need.
local function load_pace(rules)
  local floor, ceil, max, min, format, match = math.floor, math.ceil, math.max, math.min, string.format, string.match
  local base, longest, spacing, warm = rules.base, rules.max, rules.spacing, rules.warm

  -- The end of time: the last integer that is not taken for its neighbour.
  local END = 9007199254740991
  local U8, U16, U32 = 255, 65535, 4294967295

  local function after(at, wait)
    return min(at + wait, END)
  end

  local function since(at, earlier)
    return max(at - earlier, 0)
  end

  local function between(n, least, most)
    return min(max(n, least), most)
  end

  local function ms(duration)
    return min(ceil(duration), U32)
  end

  -- --- as text, as src/pace/wire.rs has it --------------------------------------------------------------------------

  -- Nothing unless `pack` may have written it: what is on the server may be anybody's.
  local function unpack(text)
    if type(text) ~= 'string' then
      return nil
    end
    local hold_until, spaced_until, warm_until, last_throttle, streak, last_ok, burst_sent, run_sent, hold, gap, hi, lo, tried,
      burst, out, run, since, need, patience, evidence, flags = match(text, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) '
      .. '(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
    if not flags then
      return nil
    end
    flags = flags + 0
    local p = {
      hold_until = hold_until + 0,
      spaced_until = spaced_until + 0,
      warm_until = warm_until + 0,
      last_throttle = last_throttle + 0,
      streak = streak + 0,
      last_ok = last_ok + 0,
      burst_sent = burst_sent + 0,
      run_sent = run_sent + 0,
      hold = hold + 0,
      gap = gap + 0,
      hi = hi + 0,
      lo = lo + 0,
      tried = tried + 0,
      burst = burst + 0,
      out = out + 0,
      run = run + 0,
      since = since + 0,
      need = need + 0,
      patience = patience + 0,
      evidence = evidence + 0,
      only_soft = flags % 2 >= 1,
      was_warm = flags % 4 >= 2,
      judged = flags % 8 >= 4,
      early = flags % 16 >= 8,
      extends = flags % 32 >= 16,
      hinted = flags % 64 >= 32,
      short_hints = flags % 128 >= 64,
      quota_left = flags % 256 >= 128,
      quota_lies = flags >= 256,
    }
    local in_range = p.hold_until <= END
      and p.spaced_until <= END
      and p.warm_until <= END
      and p.last_throttle <= END
      and p.streak <= U32
      and p.last_ok <= END
      and p.burst_sent <= END
      and p.run_sent <= END
      and p.hold <= U32
      and p.gap <= U32
      and p.hi <= U32
      and p.lo <= U32
      and p.tried <= U32
      and p.burst <= U16
      and p.out <= U16
      and p.run <= U16
      and p.since <= U8
      and p.need <= U8
      and p.patience <= U8
      and p.evidence <= U8
      and flags < 512
    return in_range and p or nil
  end

  local function pack(p)
    local flags = (p.only_soft and 1 or 0)
      + (p.was_warm and 2 or 0)
      + (p.judged and 4 or 0)
      + (p.early and 8 or 0)
      + (p.extends and 16 or 0)
      + (p.hinted and 32 or 0)
      + (p.short_hints and 64 or 0)
      + (p.quota_left and 128 or 0)
      + (p.quota_lies and 256 or 0)
    -- Never as 1e+15. An integer is formatted faster, but has 32 bits only on some servers.
    return format('%.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %d %d %d %d %d %d %d %d',
      p.hold_until, p.spaced_until, p.warm_until, p.last_throttle, p.streak, p.last_ok, p.burst_sent, p.run_sent,
      p.hold, p.gap, p.hi, p.lo, p.tried,
      p.burst, p.out, p.run, p.since, p.need, p.patience, p.evidence, flags)
  end

  -- --- into its range, as memory.rs does when it recalls ------------------------------------------------------------

  -- Whether anything was: it is to be stored then, or it would be as far ahead of every later now.
  local changed

  local function put(p, field, value)
    if p[field] ~= value then
      p[field] = value
      changed = true
    end
  end

  local function at_most(p, field, most)
    if p[field] > most then
      p[field] = most
      changed = true
    end
  end

  -- What both kinds of pacing have. The clock may have been set back: nobody waits for longer than the rules allow.
  local function clamp_common(p, now)
    at_most(p, 'hold_until', after(now, longest))
    at_most(p, 'spaced_until', after(now, spacing))
    at_most(p, 'warm_until', after(max(p.hold_until, now), warm))
    at_most(p, 'last_throttle', now)
  end

  local function clamp_learned(p, now)
    local cap = max(ms(longest), 1)
    at_most(p, 'streak', U8)
    at_most(p, 'last_ok', now)
    at_most(p, 'burst_sent', now)
    put(p, 'run_sent', p.run_sent == 0 and now or min(p.run_sent, now))
    at_most(p, 'hold', cap)
    at_most(p, 'gap', cap)
    at_most(p, 'hi', cap)
    if p.gap == 0 then
      put(p, 'hi', 0)
    elseif p.hi > 0 or p.streak == 0 or (p.streak == 1 and p.only_soft) then
      put(p, 'hi', max(p.hi, p.gap))
    end
    at_most(p, 'lo', max(p.hi, p.gap))
    at_most(p, 'tried', cap)
    put(p, 'need', max(p.need, 1))
    put(p, 'patience', between(p.patience, 8, 128))
    at_most(p, 'evidence', 16)
    put(p, 'burst', p.gap > 0 and max(p.burst, 1) or 0)
  end

  -- --- reactive.rs --------------------------------------------------------------------------------------------------

  local SOFT_HOLD = 60000

  local function blank()
    return {
      hold_until = 0,
      spaced_until = 0,
      warm_until = 0,
      last_throttle = 0,
      streak = 0,
      last_ok = 0,
      burst_sent = 0,
      run_sent = 0,
      hold = 0,
      gap = 0,
      hi = 0,
      lo = 0,
      tried = 0,
      burst = 0,
      out = 0,
      run = 0,
      since = 0,
      need = 0,
      patience = 0,
      evidence = 0,
      only_soft = false,
      was_warm = false,
      judged = false,
      early = false,
      extends = false,
      hinted = false,
      short_hints = false,
      quota_left = false,
      quota_lies = false,
    }
  end

  -- A hint of zero is none.
  local function asked_for(refusal)
    local hint = refusal.hint
    return hint and hint > 0 and hint or nil
  end

  local function escalate(streak)
    return base * 2 ^ (min(streak, 96) - 1)
  end

  local function hold_for(p, now, hold)
    p.hold_until = max(p.hold_until, after(now, hold))
    p.warm_until = max(p.warm_until, after(p.hold_until, warm))
  end

  local function reactive()
    local forget_if_cold

    local function begin()
      return blank()
    end

    local function ready(p)
      return max(p.hold_until, p.spaced_until)
    end

    local function is_cold(p, now)
      return now >= p.warm_until and now >= ready(p)
    end

    local function is_serial()
      return false
    end

    local function sent(p, now)
      if now < p.warm_until then
        p.spaced_until = max(p.spaced_until, after(now, spacing))
      end
      return false
    end

    local function throttled(p, now, ticket, refusal)
      forget_if_cold(p, now)
      local hold = asked_for(refusal)
      local new_event = p.last_throttle == 0 or (ticket ~= nil and ticket.at > p.last_throttle)
      if new_event then
        p.streak = min(p.streak + 1, U32)
        p.last_throttle = now
        hold = hold or escalate(p.streak)
      elseif not hold then
        return false
      end
      local cap = refusal.soft and min(longest, SOFT_HOLD) or longest
      hold_for(p, now, min(hold, cap))
      return new_event
    end

    local function succeeded(p, ticket)
      if ticket and ticket.at > p.last_throttle then
        p.streak = 0
      end
    end

    local function used_up(p, now, reset)
      p.hold_until = max(p.hold_until, after(now, min(reset, longest)))
    end

    local function paced_by_server() end

    local function penalize(p, now, hold)
      forget_if_cold(p, now)
      hold_for(p, now, min(hold, longest))
    end

    function forget_if_cold(p, now)
      if is_cold(p, now) then
        p.streak = 0
        p.last_throttle = 0
      end
    end

    return {
      begin = begin,
      ready = ready,
      is_cold = is_cold,
      is_serial = is_serial,
      sent = sent,
      throttled = throttled,
      succeeded = succeeded,
      used_up = used_up,
      paced_by_server = paced_by_server,
      penalize = penalize,
    }
  end

  -- --- learned.rs ---------------------------------------------------------------------------------------------------

  local function learned()
    local GUARD, SMALLEST, BUSY, QUIET, OUTAGE, CHANCE = 1000, 20, 60000, 8, 130000, 2
    local PATIENCE, MAX_PATIENCE, REPROBE, MAX_EVIDENCE = 8, 128, 4, 16

    local keeps_gap, next_hold, outlasts_the_floor, is_in_burst, anchor, judge, is_on_trial, judge_trial
    local pardon, recover, learn, relearn, step, forget_gap, forget_if_cold, end_streak, guarded

    local function begin(now, just_sent)
      local p = blank()
      p.run_sent = now
      p.burst_sent = now
      p.run = min(just_sent, U16)
      p.out = p.run
      return p
    end

    local function ready(p)
      local at = max(p.hold_until, p.spaced_until)
      local full = keeps_gap(p) and p.gap > 0 and p.out >= p.burst
      return full and max(at, after(p.burst_sent, p.gap)) or at
    end

    local function is_cold(p, now)
      return p.gap == 0 and now >= p.warm_until and now >= ready(p)
    end

    local function is_serial(p, now)
      return now < p.warm_until or p.streak > 0
    end

    function keeps_gap(p)
      return p.streak == 0 or (p.streak == 1 and p.only_soft)
    end

    local function sent(p, now)
      forget_if_cold(p, now)
      local gap, idle = p.gap, since(now, p.burst_sent)
      if p.streak == 0 and (p.run == 0 or idle > gap + BUSY) then
        p.run_sent = now
        p.run = 0
      end
      local full = p.out >= p.burst
      local kept_by_gap = full and after(p.burst_sent, gap) >= p.spaced_until
      local binding = kept_by_gap and idle <= gap * 5 / 4
      if gap == 0 or idle >= gap or not keeps_gap(p) then
        p.burst_sent = max(p.burst_sent, now)
        p.out = 0
      end
      p.out = min(p.out + 1, U16)
      if now < p.warm_until or p.burst > 1 then
        p.spaced_until = max(p.spaced_until, after(now, spacing))
      end
      return binding
    end

    -- refusals

    local function throttled(p, now, ticket, refusal)
      forget_if_cold(p, now)
      local asked = asked_for(refusal)
      local soft = refusal.soft and not asked or false
      local cap = soft and min(longest, SOFT_HOLD) or longest
      local seen_before = p.last_throttle > 0
      if seen_before and (not ticket or ticket.at <= p.last_throttle) then
        p.only_soft = p.only_soft and soft
        if asked then
          hold_for(p, now, min(guarded(p, asked), cap))
        end
        return false
      end
      local sent_at = ticket and ticket.at or now
      local right_after = sent_at >= p.hold_until and since(sent_at, p.hold_until) < GUARD
      p.short_hints = p.short_hints or (p.hinted and right_after)
      p.quota_lies = p.quota_lies or refusal.within_quota or (p.quota_left and not soft and not refusal.used_up)
      p.last_throttle = now
      if soft and refusal.again then
        local hold = p.streak > 1 and p.hold * 2 or 0
        hold = min(max(hold, base), cap)
        p.hold = ms(hold)
        hold_for(p, now, hold)
        return true
      end
      if p.streak == 0 then
        p.was_warm = now < p.warm_until
      end
      p.streak = min(p.streak + 1, U8)
      p.only_soft = soft and (p.streak == 1 or p.only_soft)
      p.tried = ms(since(sent_at, anchor(p)))
      local promised = asked and after(now, asked)
      local hopeful = (p.judged or p.only_soft) and now or judge(p, promised)
      local hold = min(next_hold(p, asked, soft, since(hopeful, now)), cap)
      p.hold = ms(hold)
      p.hinted = asked ~= nil
      hold_for(p, now, hold)
      return true
    end

    function next_hold(p, asked, soft, hopeful)
      local ladder = escalate(p.streak)
      local doubled = max(p.hold * 2, ladder)
      local whole_gap = max(p.gap, p.hi)
      asked = asked and guarded(p, asked)
      if asked and p.streak == 1 then
        return asked
      elseif p.streak == 2 and p.hinted then
        return max(asked or 0, ladder)
      elseif asked then
        return max(asked, doubled)
      elseif p.streak == 1 and (p.gap == 0 or soft) then
        return base
      elseif p.streak == 1 and p.extends then
        return max(whole_gap, base)
      elseif p.streak == 1 then
        p.early = true
        return max(hopeful, base)
      elseif p.streak == 2 and p.early then
        p.extends = true
        return max(doubled, whole_gap)
      end
      return doubled
    end

    function outlasts_the_floor(p)
      return p.gap >= spacing * p.burst
    end

    function is_in_burst(p)
      return p.burst > 1 and (p.burst_sent <= p.run_sent or not outlasts_the_floor(p))
    end

    function anchor(p)
      return (p.burst > 1 or p.gap == 0) and p.run_sent or max(p.last_ok, p.run_sent)
    end

    function judge(p, promised)
      p.judged = true
      if is_on_trial(p) then
        return judge_trial(p)
      end
      local from = anchor(p)
      local in_burst = is_in_burst(p)
      if 0 < p.gap and p.gap < p.hi and not in_burst then
        local known = promised and ms(since(promised, from)) or 0
        p.lo = min(max(p.lo, p.gap, known), p.hi)
        p.gap = p.hi
        p.patience = between(p.patience * 2, PATIENCE, MAX_PATIENCE)
        p.need = p.evidence
        p.since = 0
        return after(from, p.hi)
      end
      p.hi = 0
      return after(from, in_burst and p.gap or min(p.gap + floor(p.gap / 8), U32))
    end

    function is_on_trial(p)
      return p.gap > 0 and p.evidence == 0
    end

    function judge_trial(p)
      local expected = p.need
      p.since = 0
      p.need = 1
      p.evidence = 1
      if expected == 1 then
        p.gap = p.hi
        return after(max(p.last_ok, p.run_sent), p.hi)
      elseif p.run >= expected then
        p.gap = p.hi
        p.burst = p.run
        return after(p.run_sent, p.hi)
      end
      local hopeful = after(p.run_sent, p.hi)
      p.burst = expected
      p.hi = 0
      return hopeful
    end

    -- successes

    local function succeeded(p, ticket)
      if not ticket or ticket.at <= p.last_throttle then
        return
      end
      local at, last_ok = ticket.at, p.last_ok
      p.last_ok = max(p.last_ok, at)
      if p.streak == 0 then
        p.hinted = false
        if p.burst > 1 and p.run_sent < p.burst_sent and outlasts_the_floor(p) then
          p.run_sent = p.burst_sent
          p.run = 0
        end
        p.run = min(p.run + 1, U16)
        p.since = min(p.since + (ticket.binding and 1 or 0), U8)
        if p.gap > 0 and p.since >= p.need then
          step(p)
        end
      elseif p.streak == 1 and p.only_soft then
        pardon(p, at, ticket.again)
      else
        recover(p, at, last_ok, ticket.again)
      end
    end

    function pardon(p, at, again)
      if again and p.gap < p.hi and not is_in_burst(p) then
        judge(p, nil)
        p.judged = false
      end
      if p.hi == 0 then
        p.hi = p.gap
      end
      p.lo = min(p.lo, p.hi)
      p.streak = 0
      if not p.was_warm then
        p.warm_until = at
      end
    end

    function recover(p, at, last_ok, again)
      local let_go = min(at, p.hold_until)
      local cycle = since(let_go, p.run_sent)
      local was_burst = p.run > 1 and p.burst ~= 1 and since(last_ok, p.run_sent) * 2 < cycle
      local is_ours = again or p.run <= 1 or (was_burst and p.streak > CHANCE)
      if p.only_soft and is_ours then
        judge(p, nil)
      end
      if p.hi == 0 and p.judged then
        learn(p, cycle, since(let_go, max(last_ok, p.run_sent)), was_burst)
      end
      end_streak(p)
      p.gap = p.hi > 0 and p.evidence == 0 and min(p.hi, max(ms(spacing), 1)) or p.hi
      p.run_sent = at
      p.burst_sent = at
      p.run = 1
      p.out = 1
    end

    function learn(p, cycle, waited, was_burst)
      local cap = max(ms(longest), 1)
      local run = max(p.run, 1)
      local is_told = p.streak >= 2 or p.hinted
      if was_burst and (is_told or p.burst > 1) then
        local lo = p.only_soft and 0 or p.tried
        local hi = between(ms(cycle), 1, cap)
        if p.gap > 0 or p.only_soft then
          relearn(p, run, 1, lo, hi)
        else
          relearn(p, 1, 0, lo, hi)
          p.need = min(run, U8)
        end
      elseif p.burst > 1 then
        relearn(p, 1, p.burst, 0, between(ms(min(cycle / run, waited)), 1, cap))
      elseif p.gap == 0 then
        local lo = run == 1 and not p.only_soft and p.tried or 0
        local hi = between(ms(min(cycle / run, waited)), 1, cap)
        local evidence = p.run == 1 and hi > OUTAGE and 0 or p.run
        relearn(p, 1, evidence, lo, hi)
      elseif p.streak >= 2 then
        local most = max(p.gap, ms(spacing)) * 4
        waited = p.streak == 2 and min(ms(waited), most) or ms(waited)
        local lo = p.gap
        if p.only_soft then
          lo = 0
        elseif run == 1 then
          lo = p.tried
        end
        relearn(p, 1, max(floor(p.evidence / 4), 1), lo, between(max(waited, p.gap), 1, cap))
      elseif run >= QUIET then
        p.hi = p.gap
      else
        p.lo = p.gap
        p.hi = max(min(ms(waited), p.gap + floor(p.gap / 8), cap), p.gap)
        p.need = p.evidence
        p.since = 0
      end
    end

    function relearn(p, burst, evidence, lo, hi)
      p.burst = burst
      p.evidence = min(evidence, MAX_EVIDENCE)
      p.lo = min(lo, hi)
      p.hi = hi
      p.since = 0
      p.need = max(p.evidence, 1)
      p.patience = PATIENCE
    end

    function step(p)
      p.since = 0
      if is_on_trial(p) then
        forget_gap(p)
        return
      end
      if p.gap < p.hi then
        if p.gap < p.lo then
          p.lo = 0
        end
        p.hi = p.gap
        p.patience = PATIENCE
        p.need = p.evidence
      end
      if p.hi - p.lo > floor(p.hi / 7) then
        local middle = p.lo + floor((p.hi - p.lo) / 2)
        p.gap = max(middle, p.hi - floor(p.hi / 3))
      elseif p.need > p.evidence then
        p.gap = p.hi - floor(p.hi / REPROBE)
        p.need = p.evidence
      else
        p.need = max(p.patience, p.evidence + 1)
      end
      if p.gap < SMALLEST then
        forget_gap(p)
      end
    end

    -- other news

    local function used_up(p, now, reset)
      p.quota_left = false
      local held = after(now, min(guarded(p, reset), longest))
      if held > p.hold_until then
        p.hold_until = held
        p.hinted = true
      end
    end

    local function paced_by_server(p)
      p.quota_left = true
      if not p.quota_lies then
        forget_gap(p)
      end
    end

    local function penalize(p, now, hold)
      forget_if_cold(p, now)
      p.only_soft = false
      hold_for(p, now, min(hold, longest))
    end

    function forget_gap(p)
      p.gap, p.hi, p.lo, p.burst = 0, 0, 0, 0
    end

    function forget_if_cold(p, now)
      if p.streak == 0 then
        return
      end
      if is_cold(p, now) then
        local short_hints, quota_lies = p.short_hints, p.quota_lies
        for field, value in pairs(begin(now, 0)) do
          p[field] = value
        end
        p.short_hints, p.quota_lies = short_hints, quota_lies
      elseif p.gap > 0 and now >= max(p.warm_until, p.hold_until, p.spaced_until) then
        end_streak(p)
        p.hold, p.run = 0, 0
      end
    end

    function end_streak(p)
      if p.hi == 0 then
        p.hi = p.gap
      end
      p.lo = min(p.lo, p.hi)
      p.streak = 0
      p.judged = false
      p.early = false
      p.hinted = false
    end

    function guarded(p, asked)
      return p.short_hints and asked + GUARD or asked
    end

    return {
      begin = begin,
      ready = ready,
      is_cold = is_cold,
      is_serial = is_serial,
      sent = sent,
      throttled = throttled,
      succeeded = succeeded,
      used_up = used_up,
      paced_by_server = paced_by_server,
      penalize = penalize,
    }
  end

  local pace = rules.learned and learned() or reactive()
  pace.unpack = unpack
  pace.pack = pack

  -- True when anything was beyond its range.
  function pace.clamp(p, now)
    changed = false
    clamp_common(p, now)
    if rules.learned then
      clamp_learned(p, now)
    end
    return changed
  end

  -- Takes up what another process has learnt while it could not reach the server. Only extends: what was learnt here in
  -- the meantime is as good.
  function pace.merge(p, other, now)
    if not p or pace.is_cold(p, now) then
      return other
    end
    p.hold_until = max(p.hold_until, other.hold_until)
    p.warm_until = max(p.warm_until, other.warm_until)
    p.spaced_until = max(p.spaced_until, other.spaced_until)
    p.streak = max(p.streak, other.streak)
    return p
  end

  return pace
end
