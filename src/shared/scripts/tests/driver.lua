-- Put behind pace.lua: runs the commands in ARGV one after the other, and gives back what is known of the host after each.

local pace, p
local now, answer

-- A number that may be missing is written as -1.
local function known(word)
  return word ~= '-1' and tonumber(word) or nil
end

local function ticket(at, binding, again)
  return known(at) and { at = tonumber(at), binding = binding == '1', again = again == '1' } or nil
end

local commands = {
  rules = function(learned, base, longest, spacing, warm)
    pace = load_pace({
      learned = learned == '1',
      base = tonumber(base),
      max = tonumber(longest),
      spacing = tonumber(spacing),
      warm = tonumber(warm),
    })
  end,
  begin = function(just_sent)
    p = pace.begin(now, tonumber(just_sent))
  end,
  look = function() end,
  sent = function()
    answer = pace.sent(p, now)
  end,
  throttled = function(at, binding, again_sent, hint, soft, again, within_quota, used_up)
    answer = pace.throttled(p, now, ticket(at, binding, again_sent), {
      hint = known(hint),
      soft = soft == '1',
      again = again == '1',
      within_quota = within_quota == '1',
      used_up = used_up == '1',
    })
  end,
  succeeded = function(at, binding, again)
    pace.succeeded(p, ticket(at, binding, again))
  end,
  used_up = function(reset)
    pace.used_up(p, now, tonumber(reset))
  end,
  paced_by_server = function()
    pace.paced_by_server(p)
  end,
  penalize = function(hold)
    pace.penalize(p, now, tonumber(hold))
  end,
  -- What the server says of a field that is not there.
  unpack_missing = function()
    p = pace.unpack(false)
  end,
}

-- Of these, all that follows is one text.
local of_text = {
  -- As a script does with what it finds.
  recall = function(text)
    p = pace.unpack(text)
    if p then
      answer = pace.clamp(p, now)
    end
  end,
  unpack = function(text)
    p = pace.unpack(text)
  end,
  merge = function(text)
    p = pace.merge(p, pace.unpack(text), now)
  end,
}

local function bit(bool)
  assert(type(bool) == 'boolean')
  return bool and '1' or '0'
end

local seen = {}
for i, command in ipairs(ARGV) do
  local name, at, rest = string.match(command, '^(%S+) (%d+) ?(.*)$')
  now, answer = tonumber(at), false
  if of_text[name] then
    of_text[name](rest)
  else
    local words = {}
    for word in string.gmatch(rest, '%S+') do
      words[#words + 1] = word
    end
    commands[name](unpack(words))
  end
  seen[i] = p and table.concat({
    pace.pack(p),
    string.format('%.0f', pace.ready(p)),
    bit(pace.is_cold(p, now)),
    bit(pace.is_serial(p, now)),
    bit(answer),
  }, ' ') or ''
end
return seen
