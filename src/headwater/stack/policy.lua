-- What a valid token may do: runs in Envoy after the token's signature, issuer, audience and times were checked.
--
-- `POLICY` (a table of the settings) is put in front of this text by `stack/policy.py`. Invariant: whatever goes wrong
-- in here refuses the request. Names are decoded once and by the server's rules, so that no spelling of a path is
-- judged by one meaning and served by another.

local STREAMS = "/v1/stream/"
local BUCKETS = "/ds/"
local SHARD_KEY = "x-headwater-shard-key"
local TIMEOUT = "x-envoy-upstream-rq-timeout-ms"
local MAX_TIMEOUT_MS = 2 ^ 31
local READS = { GET = true, HEAD = true, OPTIONS = true }

local function refusal(status, code, detail)
  return { status = status, code = code, detail = detail }
end

local function starts_with(text, prefix)
  return text:sub(1, #prefix) == prefix
end

-- The decoded text, or nil when it could be read in two ways.
local function decoded(raw)
  local lowered = raw:lower()
  if lowered:find("%2f", 1, true) or lowered:find("%5c", 1, true) then return nil end
  if raw:gsub("%%%x%x", ""):find("%", 1, true) then return nil end
  local text = raw:gsub("%%(%x%x)", function(pair) return string.char(tonumber(pair, 16)) end)
  if text:find("[%z\1-\31\127\\]") then return nil end
  return text
end

local function segments_of(text)
  local found = {}
  for segment in (text .. "/"):gmatch("([^/]*)/") do
    if segment == "" or segment == "." or segment == ".." then return nil end
    found[#found + 1] = segment
  end
  return found
end

-- One spelling for each name, so that it has one home among the shards.
local function encoded(text)
  return (text:gsub("[^A-Za-z0-9_.~/-]", function(byte) return string.format("%%%02X", byte:byte()) end))
end

-- What a path names: a table with `kind`, or nil when it is none that the server would take.
local function place_of(path)
  if path == "/ds" then return { kind = "buckets", names = {} } end
  if starts_with(path, STREAMS .. "__ds/") then
    -- No stream: the subscription API, which takes encoded slashes in the names it is given.
    return { kind = "stream", names = { "__ds" }, home = STREAMS .. "__ds" }
  end
  local root = (starts_with(path, STREAMS) and STREAMS) or (starts_with(path, BUCKETS) and BUCKETS)
  if not root then return { kind = "page", names = {} } end
  local text = decoded(path:sub(#root + 1))
  local names = text and segments_of(text)
  if not names then return nil end
  if root == BUCKETS then
    return { kind = "bucket", names = names, home = BUCKETS .. encoded(names[1]) }
  end
  return { kind = "stream", names = names, home = STREAMS .. encoded(text) }
end

-- The public keys of webhooks, and what workers say with the token of their wake, which the server checks itself.
local function is_open(method, path)
  if path == "/healthz" then return true end
  if POLICY.open_ui and (path == "/ui" or starts_with(path, "/ui/")) then return READS[method] or false end
  if path == STREAMS .. "__ds/jwks.json" then return READS[method] or false end
  local action = path:match("^/v1/stream/__ds/subscriptions/[^/]+/(%l+)$")
  return method == "POST" and (action == "ack" or action == "release" or action == "callback")
end

local function is_reserved(place)
  if place.kind == "page" then return true end
  for depth = 1, place.kind == "bucket" and 2 or 1 do
    if place.names[depth] and starts_with(place.names[depth], "__") then return true end
  end
  return false
end

local function lies_in(place, namespace)
  if place.kind == "bucket" then return place.names[1] == namespace end
  if place.kind ~= "stream" then return false end
  local wanted = segments_of(namespace)
  if not wanted or #place.names <= #wanted then return false end
  for depth, name in ipairs(wanted) do
    if place.names[depth] ~= name then return false end
  end
  return true
end

-- The set of scopes, or nil when the claim has another shape than a string or a list of strings.
-- Envoy gives a string as the list of its words.
local function scopes_of(claims)
  local found, count = {}, 0
  local scope = claims["scope"]
  if scope == nil then return found end
  if type(scope) == "string" then
    for word in scope:gmatch("%S+") do found[word] = true end
    return found
  end
  if type(scope) ~= "table" then return nil end
  for key, word in pairs(scope) do
    if type(key) ~= "number" or type(word) ~= "string" then return nil end
    found[word] = true
    count = count + 1
  end
  -- A list with holes had a null in it.
  return count == #scope and found or nil
end

local function may_reach(place, claims, scopes)
  local namespace = nil
  -- Not `and … or`: a claim that is false must be refused like any other that is not text.
  if POLICY.namespace_claim ~= "" then namespace = claims[POLICY.namespace_claim] end
  if namespace ~= nil then
    if type(namespace) ~= "string" or not segments_of(namespace) then
      return refusal(403, "bad_namespace", "The token's namespace is not one that a stream could lie in.")
    end
    if not lies_in(place, namespace) then
      return refusal(403, "outside_namespace", "The token reaches only streams in its namespace.")
    end
  elseif POLICY.require_namespace and not scopes["streams:admin"] then
    return refusal(403, "no_namespace", "The token names no namespace.")
  end
  if is_reserved(place) and not scopes["streams:admin"] and (place.kind == "page" or not POLICY.open_reserved) then
    return refusal(403, "reserved", "This address takes the scope streams:admin.")
  end
  return nil
end

local function may_do(method, scopes)
  if not POLICY.require_scopes or scopes["streams:admin"] then return nil end
  local reads = READS[method] or false
  if (reads and scopes["streams:read"]) or ((not reads or method == "HEAD") and scopes["streams:write"]) then
    return nil
  end
  return refusal(403, "missing_scope", "This takes the scope " .. (reads and "streams:read." or "streams:write."))
end

local function source_of_fork(headers)
  local count = headers:getNumValues("stream-forked-from")
  if count == 0 then return nil, nil end
  local source = count == 1 and place_of(headers:get("stream-forked-from"))
  if not source or source.kind == "page" or source.kind == "buckets" then
    return nil, refusal(400, "bad_request", "Stream-Forked-From must be the path of one stream.")
  end
  return source, nil
end

local function with_a_token(headers, place, source, claims)
  local method = headers:get(":method")
  local subject = claims["sub"]
  if type(subject) ~= "string" or subject == "" or #subject > 256 or subject:find("[^\32-\126]") then
    return refusal(403, "bad_subject", "The token names no usable subject.")
  end
  if headers:getNumValues(POLICY.identity_header) ~= 1 or headers:get(POLICY.identity_header) ~= subject then
    return refusal(400, "several_tokens", "Send exactly one token.")
  end
  local scopes = scopes_of(claims)
  if not scopes then
    return refusal(403, "bad_scope", "The token's scope must be a string or a list of strings.")
  end
  local wrong = may_do(method, scopes) or may_reach(place, claims, scopes)
  if not wrong and source then
    -- Whoever forks a stream can read it.
    wrong = may_do("GET", scopes) or may_reach(source, claims, scopes)
  end
  return wrong
end

local function is_live(method, target)
  local query = target:match("%?(.*)")
  if method ~= "GET" or not query then return false end
  for name in query:gmatch("([^&=]+)[^&]*") do
    if name:gsub("%%(%x%x)", function(pair) return string.char(tonumber(pair, 16)) end) == "live" then return true end
  end
  return false
end

-- A live read ends with its token: Envoy's router resets it then, as it would a request that takes too long.
local function end_with_token(handle, claims)
  local expiry = claims["exp"]
  if type(expiry) ~= "number" then
    return refusal(403, "bad_expiry", "The token's exp must be a number.")
  end
  local left_ms = (expiry + POLICY.clock_skew_secs) * 1000 - tonumber(handle:timestamp())
  -- 0 would mean no limit at all.
  left_ms = math.max(1, math.min(left_ms, MAX_TIMEOUT_MS))
  handle:headers():replace(TIMEOUT, string.format("%d", left_ms))
  handle:streamInfo():dynamicMetadata():set("headwater", "ends_with_token", true)
  return nil
end

local function across_shards(place)
  if place.kind == "buckets" then
    return refusal(501, "sharded", "The buckets of several shards are not listed together.")
  end
  if place.kind == "stream" and place.names[1] == "__ds" then
    return refusal(501, "sharded", "Subscriptions need a server that has all streams; this one has several shards.")
  end
  if place.kind == "stream" and place.names[1] == "__registry__" then
    return refusal(501, "sharded", "Each shard has only streams of its own, so there is no registry of all.")
  end
  return nil
end

local function judge(handle)
  local headers = handle:headers()
  local method = headers:get(":method")
  local path = headers:get(":path"):match("^[^?#]*")
  local place = place_of(path)
  if not place then
    return refusal(400, "invalid_name", "The path does not name a stream in one plain way.")
  end
  local source, wrong = source_of_fork(headers)
  if wrong then return wrong end
  if POLICY.checks_tokens and not is_open(method, path) then
    local metadata = handle:streamInfo():dynamicMetadata():get("envoy.filters.http.jwt_authn")
    local claims = metadata and metadata["jwt"]
    if claims then
      wrong = with_a_token(headers, place, source, claims)
      if not wrong and is_live(method, headers:get(":path")) then wrong = end_with_token(handle, claims) end
    elseif method ~= "OPTIONS" then
      -- Only a CORS preflight comes this far without a token.
      wrong = refusal(401, "no_token", "A token is needed.")
    end
    if wrong then return wrong end
  end
  if POLICY.shards > 1 then
    wrong = across_shards(place)
    if wrong then return wrong end
    headers:replace(SHARD_KEY, place.home or path)
    if source then handle:streamInfo():dynamicMetadata():set("headwater", "forks", true) end
  end
  return nil
end

-- As the server writes its own refusals (RFC 9457).
local function body_of(wrong)
  return '{"type":"about:blank","status":' .. wrong.status .. ',"code":"' .. wrong.code
    .. '","detail":"' .. wrong.detail .. '"}'
end

function envoy_on_request(handle)
  local ran, wrong = pcall(judge, handle)
  if not ran then
    handle:logErr("policy: " .. tostring(wrong))
    wrong = refusal(500, "policy_failed", "The request could not be judged.")
  end
  if wrong then
    local headers = { [":status"] = tostring(wrong.status), ["content-type"] = "application/problem+json" }
    handle:respond(headers, body_of(wrong))
  end
end

function envoy_on_response(handle)
  if POLICY.shards <= 1 or handle:headers():get(":status") ~= "404" then return end
  local mark = handle:streamInfo():dynamicMetadata():get("headwater")
  if not mark or not mark["forks"] then return end
  local told = body_of(refusal(404, "source_not_on_shard",
    "The source is not on the shard of the new stream; with " .. POLICY.shards .. " shards, forks stay on one."))
  handle:headers():replace("content-type", "application/problem+json")
  handle:headers():replace("content-length", tostring(handle:body(true):setBytes(told)))
end
