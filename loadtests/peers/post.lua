-- wrk -s post.lua URL -- @Header=value ... FILE ...: posts the files in turn; prints one line "RESULT {json}".
local bodies, at = {}, 0

function init(args)
  for _, arg in ipairs(args) do
    local name, value = arg:match("^@([^=]+)=(.*)$")
    if name then
      wrk.headers[name] = value
    else
      local file = assert(io.open(arg, "rb"))
      bodies[#bodies + 1] = file:read("*a")
      file:close()
    end
  end
  for i, body in ipairs(bodies) do bodies[i] = wrk.format("POST", nil, nil, body) end
end

function request()
  at = at % #bodies + 1
  return bodies[at]
end

function done(summary, latency, _)
  local errors = summary.errors
  io.write(string.format('RESULT {"fps": %.2f, "p50_ms": %.2f, "p99_ms": %.2f, "answers": %d, "bad": %d}\n',
    (summary.requests - errors.status) / (summary.duration / 1e6), latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    summary.requests, errors.status + errors.connect + errors.read + errors.write + errors.timeout))
end
