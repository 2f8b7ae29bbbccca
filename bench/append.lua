-- wrk script: POST one fixed body to one or more streams, and print the totals as one line of JSON.
-- Arguments after `--`: content type, body, then the paths of the streams.

local requests = {}
local turn = 0

function init(args)
  local headers = { ["Content-Type"] = args[1] }
  for index = 3, #args do
    requests[#requests + 1] = wrk.format("POST", args[index], headers, args[2])
  end
end

function request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency, _)
  local errors = summary.errors
  io.write(string.format(
    'RESULT {"requests": %d, "duration_us": %d, "p50_us": %d, "p99_us": %d, "refused": %d, "broken": %d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99), errors.status,
    errors.connect + errors.read + errors.write + errors.timeout))
end
