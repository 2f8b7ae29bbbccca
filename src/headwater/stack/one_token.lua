-- Reject requests with more than one token (RFC 6750 §2). Runs in Envoy before tokens are checked.
--
-- Envoy would check every token that it finds and forward all their subjects to the server. Invariant: any error in
-- this script rejects the request.

local function tokens_in_query(target)
  local count = 0
  local query = target:match("%?(.*)")
  for name in (query or ""):gmatch("([^&=]+)[^&]*") do
    local text = name:gsub("%%(%x%x)", function(pair) return string.char(tonumber(pair, 16)) end)
    if text == "access_token" then count = count + 1 end
  end
  return count
end

-- Envoy joins repeated headers with commas, and a token never contains a comma.
local function tokens_in_header(headers)
  local count = headers:getNumValues("authorization")
  local _, commas = (headers:get("authorization") or ""):gsub(",", "")
  return count + commas
end

local function tokens_in(headers)
  return tokens_in_header(headers) + tokens_in_query(headers:get(":path"))
end

function envoy_on_request(handle)
  local ran, count = pcall(tokens_in, handle:headers())
  if ran and count <= 1 then return end
  if not ran then handle:logErr("one_token: " .. tostring(count)) end
  handle:respond({ [":status"] = "400", ["content-type"] = "application/problem+json" },
    '{"type":"about:blank","status":400,"code":"several_tokens","detail":"Send exactly one token, in the Authorization'
    .. ' header or as access_token in the query."}')
end
