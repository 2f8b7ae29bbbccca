-- Authorize requests. Runs in Envoy after it has checked the token's signature, issuer, audience and times.
--
-- `stack/policy.py` puts `POLICY` (a table of the settings) in front of this text. Invariant: any error in this script
-- rejects the request. Names are decoded once, by the server's rules, so that the checks and the server always
-- interpret a path in the same way.

local STREAMS = "/v1/stream/"
local BUCKETS = "/ds/"
local FOLLOW = STREAMS .. "__ds/follow/"
local SHAPES = "/v1/shape"
-- What the token allows, for requests that name streams in their body or query. The server applies it (http/scopes.py).
local NAMESPACE = "x-headwater-namespace"
local RESERVED = "x-headwater-reserved"
local TIMEOUT = "x-envoy-upstream-rq-timeout-ms"
local MAX_TIMEOUT_MS = 2 ^ 31
local READS = { GET = true, HEAD = true, OPTIONS = true }

local function refusal(status, code, detail)
  return { status = status, code = code, detail = detail }
end

local function starts_with(text, prefix)
  return text:sub(1, #prefix) == prefix
end

-- Decode a path, or return nil if it is ambiguous.
local function decoded(raw)
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

-- Headers are ASCII.
local function encoded(text)
  return (text:gsub("[^A-Za-z0-9_.~/-]", function(byte) return string.format("%%%02X", byte:byte()) end))
end

-- Replace another stream root by the first one, as the server does before it looks at anything else.
local function canonical(path)
  for _, alias in ipairs(POLICY.root_aliases) do
    if starts_with(path, alias .. "/") then return STREAMS .. path:sub(#alias + 2) end
  end
  return path
end

-- Parse a path into a table with `kind`; nil if the server would not accept it.
local function parse_target(path)
  if path == "/ds" then return { kind = "buckets", names = {} } end
  if path == SHAPES then return { kind = "shapes", names = {} } end
  if path == STREAMS .. "__ds/streams" or path == STREAMS .. "__ds/follow" or starts_with(path, FOLLOW) then
    -- Many streams, which the path does not name.
    return { kind = "many", names = { "__ds" } }
  end
  if starts_with(path, STREAMS .. "__ds/") then
    -- Not a stream: the subscription API, which accepts encoded slashes in names.
    return { kind = "stream", names = { "__ds" } }
  end
  local root = (starts_with(path, STREAMS) and STREAMS) or (starts_with(path, BUCKETS) and BUCKETS)
  if not root then return { kind = "page", names = {} } end
  local below = path:sub(#root + 1)
  -- In the name of a stream an encoded slash is a slash. The parts of a bucket's path cannot contain one.
  if root == BUCKETS and below:lower():find("%2f", 1, true) then return nil end
  local text = decoded(below)
  local names = text and segments_of(text)
  if not names then return nil end
  if root == BUCKETS then
    return { kind = "bucket", names = names }
  end
  return { kind = "stream", names = names }
end

-- Routes without a token: the public keys of webhooks, and the actions of workers, whose wake token the server checks.
local function is_open(method, path)
  if path == "/healthz" then return true end
  local is_ui = path == "/" or path == "/ui" or starts_with(path, "/ui/")
  if POLICY.open_ui and is_ui then return READS[method] or false end
  if path == STREAMS .. "__ds/jwks.json" then return READS[method] or false end
  local action = path:match("^/v1/stream/__ds/subscriptions/[^/]+/(%l+)$")
  return method == "POST" and (action == "ack" or action == "release" or action == "callback")
end

-- What a request does: a POST about a shape or about many streams is a read with parameters too long for a URL.
local function effective_method(method, resource)
  return (resource.kind == "shapes" or resource.kind == "many") and method == "POST" and "GET" or method
end

local function is_reserved(resource)
  if resource.kind == "page" then return true end
  for depth = 1, resource.kind == "bucket" and 2 or 1 do
    if resource.names[depth] and starts_with(resource.names[depth], "__") then return true end
  end
  return false
end

local function is_in_namespace(resource, namespace)
  if resource.kind == "bucket" then return resource.names[1] == namespace end
  if resource.kind ~= "stream" then return false end
  local wanted = segments_of(namespace)
  if not wanted or #resource.names <= #wanted then return false end
  for depth, name in ipairs(wanted) do
    if resource.names[depth] ~= name then return false end
  end
  return true
end

-- Return the set of scopes, or nil if the claim is neither a string nor a list of strings.
-- Envoy passes a string as the list of its words.
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
  -- A list with holes contained a null.
  return count == #scope and found or nil
end

local function may_reach(resource, claims, scopes)
  local namespace = nil
  -- Not `and … or`: a claim that is `false` must be rejected like any other claim that is not a string.
  if POLICY.namespace_claim ~= "" then namespace = claims[POLICY.namespace_claim] end
  if namespace ~= nil then
    if type(namespace) ~= "string" or not segments_of(namespace) then
      return refusal(403, "bad_namespace", "The token's namespace is not a valid stream path.")
    end
    if resource.kind ~= "many" and not is_in_namespace(resource, namespace) then
      return refusal(403, "outside_namespace", "The token allows access only to streams in its namespace.")
    end
  elseif POLICY.require_namespace and not scopes["streams:admin"] then
    return refusal(403, "no_namespace", "The token has no namespace claim, and this server requires one.")
  end
  if resource.kind == "many" then
    resource.namespace = namespace and encoded(namespace)
    resource.denies_reserved = not POLICY.open_reserved and not scopes["streams:admin"]
    return nil
  end
  local needs_admin = is_reserved(resource) and (resource.kind == "page" or not POLICY.open_reserved)
  if needs_admin and not scopes["streams:admin"] then
    return refusal(403, "reserved", "This address requires the scope streams:admin.")
  end
  return nil
end

local function may_do(method, scopes)
  if not POLICY.require_scopes or scopes["streams:admin"] then return nil end
  local reads = READS[method] or false
  if (reads and scopes["streams:read"]) or ((not reads or method == "HEAD") and scopes["streams:write"]) then
    return nil
  end
  local needed = reads and "streams:read" or "streams:write"
  return refusal(403, "missing_scope", "This request requires the scope " .. needed .. ".")
end

local function source_of_fork(headers)
  local count = headers:getNumValues("stream-forked-from")
  if count == 0 then return nil, nil end
  local source = count == 1 and parse_target(canonical(headers:get("stream-forked-from")))
  if not source or source.kind == "page" or source.kind == "buckets" or source.kind == "many" then
    return nil, refusal(400, "bad_request", "Stream-Forked-From must be the path of one stream.")
  end
  return source, nil
end

local function with_a_token(headers, resource, source, claims)
  local method = headers:get(":method")
  local subject = claims["sub"]
  if type(subject) ~= "string" or subject == "" or #subject > 256 or subject:find("[^\32-\126]") then
    return refusal(403, "bad_subject", "The token's sub must be 1 to 256 characters of printable ASCII.")
  end
  if headers:getNumValues(POLICY.identity_header) ~= 1 or headers:get(POLICY.identity_header) ~= subject then
    return refusal(400, "several_tokens", "Send exactly one token.")
  end
  local scopes = scopes_of(claims)
  if not scopes then
    return refusal(403, "bad_scope", "The token's scope must be a string or a list of strings.")
  end
  local wrong = may_do(effective_method(method, resource), scopes) or may_reach(resource, claims, scopes)
  if not wrong and resource.kind == "shapes" and method == "DELETE" and not scopes["streams:admin"] then
    wrong = refusal(403, "reserved", "This request requires the scope streams:admin.")
  end
  if not wrong and source then
    -- A fork contains the data of its source, so it requires read access to the source.
    wrong = may_do("GET", scopes) or may_reach(source, claims, scopes)
  end
  return wrong
end

local function is_live(method, target)
  if method == "GET" and starts_with(target, FOLLOW) then return true end
  local query = target:match("%?(.*)")
  if method ~= "GET" or not query then return false end
  for name in query:gmatch("([^&=]+)[^&]*") do
    if name:gsub("%%(%x%x)", function(pair) return string.char(tonumber(pair, 16)) end) == "live" then return true end
  end
  return false
end

-- End a live read when its token expires: Envoy's router then resets it like a request that timed out.
local function limit_to_expiry(handle, claims)
  local expiry = claims["exp"]
  if type(expiry) ~= "number" then
    return refusal(403, "bad_expiry", "The token's exp must be a number.")
  end
  local left_ms = (expiry + POLICY.clock_skew_secs) * 1000 - tonumber(handle:timestamp())
  -- 0 would mean no limit.
  left_ms = math.max(1, math.min(left_ms, MAX_TIMEOUT_MS))
  handle:headers():replace(TIMEOUT, string.format("%d", left_ms))
  handle:streamInfo():dynamicMetadata():set("headwater", "ends_with_token", true)
  return nil
end

local function judge(handle)
  local headers = handle:headers()
  local method = headers:get(":method")
  local path = headers:get(":path"):match("^[^?#]*")
  local resource = parse_target(canonical(path))
  if not resource then
    return refusal(400, "invalid_name",
      "The path contains an empty segment, '.', '..', a backslash or a control character.")
  end
  local source, wrong = source_of_fork(headers)
  if wrong then return wrong end
  if not is_open(method, path) then
    local metadata = handle:streamInfo():dynamicMetadata():get("envoy.filters.http.jwt_authn")
    local claims = metadata and metadata["jwt"]
    if claims then
      wrong = with_a_token(headers, resource, source, claims)
      if not wrong and is_live(method, canonical(headers:get(":path"))) then wrong = limit_to_expiry(handle, claims) end
      if resource.namespace then headers:replace(NAMESPACE, resource.namespace) end
      if resource.denies_reserved then headers:replace(RESERVED, "deny") end
    elseif method ~= "OPTIONS" then
      -- Only a CORS preflight request reaches this point without a token.
      wrong = refusal(401, "no_token", "This request requires a token (Authorization: Bearer …).")
    end
    if wrong then return wrong end
  end
  return nil
end

-- The same error format as the server's (RFC 9457).
local function body_of(wrong)
  return '{"type":"about:blank","status":' .. wrong.status .. ',"code":"' .. wrong.code
    .. '","detail":"' .. wrong.detail .. '"}'
end

function envoy_on_request(handle)
  local ran, wrong = pcall(judge, handle)
  if not ran then
    handle:logErr("policy: " .. tostring(wrong))
    wrong = refusal(500, "policy_failed", "The authorization policy failed; see the log of Envoy.")
  end
  if wrong then
    local headers = { [":status"] = tostring(wrong.status), ["content-type"] = "application/problem+json" }
    handle:respond(headers, body_of(wrong))
  end
end
