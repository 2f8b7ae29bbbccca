-- wrk script: POST one fixed body to one or more streams, and print the totals as one line of JSON.
-- Arguments after `--`: content type, body, number of streams that each thread uses, then the paths of the streams.
-- Threads take streams from this list in turn. A thread with one stream sends a constant request, which wrk builds once.

local threads = 0
local requests = {}
local turn = 0

function setup(thread)
  thread:set("number", threads)
  threads = threads + 1
end

function init(args)
  local count, streams = tonumber(args[3]), #args - 3
  wrk.method, wrk.headers["Content-Type"], wrk.body = "POST", args[1], args[2]
  wrk.path = args[4 + number * count % streams]
  if count > 1 then
    for index = 0, count - 1 do
      requests[#requests + 1] = wrk.format(nil, args[4 + (number * count + index) % streams])
    end
    request = next_request
  end
end

function next_request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency, _)
  local errors = summary.errors
  io.write(string.format(
    'RESULT {"requests": %d, "duration_us": %d, "p50_us": %d, "p99_us": %d, "p999_us": %d, "refused": %d, "broken": %d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    latency:percentile(99.9), errors.status,
    errors.connect + errors.read + errors.write + errors.timeout))
end
