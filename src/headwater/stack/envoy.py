"""Envoy configuration: authentication, routing, no timeouts on live reads.

Invariant: on every route, an identity header that reaches the server was written by Envoy from a valid token.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from headwater.config import Settings
from headwater.stack.envoy_tracing import OTEL_CLUSTER, tracing
from headwater.stack.policy import IDENTITY_HEADER, SCOPE_HEADERS, one_token_script, policy_script

Tree: TypeAlias = dict[str, Any]

TIMEOUT_HEADER: Final = "x-envoy-upstream-rq-timeout-ms"
"""The policy script sets this header to limit the duration of a live read."""
_PROXY_HEADERS: Final = (IDENTITY_HEADER, TIMEOUT_HEADER, *SCOPE_HEADERS)
"""Headers that only Envoy sets; those of clients are removed."""
_TYPES: Final = "type.googleapis.com/envoy."
_FILTERS: Final = "envoy.filters.http."
_JWT_METADATA: Final = "envoy.filters.http.jwt_authn"
_SYSTEM_CA: Final = "/etc/ssl/certs/ca-certificates.crt"
_SUBJECTS_MAX: Final = 10_000
"""Maximum number of subjects with a rate limit; beyond it, the least recently seen subject is dropped."""
_ADMIN_READS: Final = ("/ready", "/stats", "/stats/prometheus", "/clusters", "/listeners", "/server_info", "/memory")


_HEALTH_CHECK: Final[Tree] = {
    "timeout": "1s",
    "interval": "1s",
    "unhealthy_threshold": 1,
    "healthy_threshold": 1,
    "http_health_check": {"path": "/healthz"},
}
"""Of the nodes of a cluster. Requests of this check have the name of the upstream as their host."""


class EnvoyError(Exception):
    """Envoy is not installed or rejects its configuration; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """A process that Envoy forwards requests to."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class EnvoyEndpoints:
    """The addresses that the configuration contains and that are not settings."""

    server: Upstream
    jwks: Path | str
    """The public keys: a file whose content is copied into the configuration, or a URL that Envoy fetches regularly."""
    shapes: Upstream | None = None
    """The process of `headwater shapes`, if there is one."""
    other_nodes: tuple[Upstream, ...] = ()
    """Further nodes of a cluster: any of them takes any request."""
    admin_socket: str = ""
    """Unix socket of the admin interface, used if no port is set; may be relative to Envoy's working directory."""


def find_envoy(settings: Settings) -> Path:
    """Find the executable: from the settings, from the Python package, or on PATH."""
    if settings.proxy.envoy_path is not None:
        if not settings.proxy.envoy_path.is_file():
            raise EnvoyError(f"proxy.envoy_path: {settings.proxy.envoy_path} does not exist")
        return settings.proxy.envoy_path.absolute()
    # Only the location of the package is needed; importing it would also read its metadata.
    spec = find_spec("envoy")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "_bin" / "envoy"
        if packaged.is_file():
            return packaged
    if (found := shutil.which("envoy")) is not None:
        return Path(found)
    raise EnvoyError(
        "Envoy is not installed. Run `pip install 'headwater[stack]'`, which includes it (Linux with glibc, macOS 15 on"
        " ARM), or install it and set proxy.envoy_path, or use docker-compose.yml."
    )


def validate(executable: Path, config: Path) -> None:
    """Check a configuration with Envoy's own validation mode."""
    done = subprocess.run(
        [executable, "--mode", "validate", "--config-path", config, "--log-level", "error"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise EnvoyError(f"Envoy rejects {config}: {output[-1] if output else f'exit code {done.returncode}'}")


def envoy_config(settings: Settings, endpoints: EnvoyEndpoints) -> str:
    """Return the configuration as JSON, which Envoy accepts like YAML."""
    clusters = [_streams_cluster(settings, endpoints)]
    if endpoints.shapes is not None:
        clusters.append(_shapes_cluster(settings, endpoints.shapes))
    if isinstance(endpoints.jwks, str):
        clusters.append(_url_cluster("jwks", endpoints.jwks, settings.auth.jwks_ca_path))
    if settings.otel.endpoint:
        clusters.append(_url_cluster(OTEL_CLUSTER, settings.otel.endpoint, None))
    config = {
        **_admin(settings, endpoints),
        "static_resources": {"listeners": [_listener(settings, endpoints)], "clusters": clusters},
        # Without a limit, a flood of connections could use all memory of the host.
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": {
                        "@type": f"{_TYPES}extensions.resource_monitors.downstream_connections.v3."
                        "DownstreamConnectionsConfig",
                        "max_active_downstream_connections": settings.server.max_connections,
                    },
                }
            ]
        },
    }
    return json.dumps(config, indent=1)


def _admin(settings: Settings, endpoints: EnvoyEndpoints) -> Tree:
    """The admin interface, which has no authentication and can stop Envoy: a private socket, or a read-only port."""
    if settings.proxy.admin_port:
        # Any web page can send requests to a loopback port, so only pages without side effects are allowed.
        reads = [{"exact": path} for path in _ADMIN_READS]
        queries = [{"prefix": f"{path}?"} for path in _ADMIN_READS]
        address = _address("127.0.0.1", settings.proxy.admin_port)
        return {"admin": {"address": address, "allow_paths": [*reads, *queries]}}
    if endpoints.admin_socket:
        return {"admin": {"address": {"pipe": {"path": endpoints.admin_socket, "mode": 0o600}}}}
    return {}


def _listener(settings: Settings, endpoints: EnvoyEndpoints) -> Tree:
    chain: Tree = {"filters": [_connection_manager(settings, endpoints)]}
    proxy = settings.proxy
    if proxy.tls_cert_path is not None and proxy.tls_key_path is not None:
        chain["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": f"{_TYPES}extensions.transport_sockets.tls.v3.DownstreamTlsContext",
                "common_tls_context": {
                    "alpn_protocols": ["h2", "http/1.1"],
                    "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
                    "tls_certificates": [
                        {
                            "certificate_chain": {"filename": str(proxy.tls_cert_path.resolve())},
                            "private_key": {"filename": str(proxy.tls_key_path.resolve())},
                        }
                    ],
                },
            },
        }
    return {
        "name": "public",
        "address": _address(proxy.host, proxy.port),
        "filter_chains": [chain],
        "per_connection_buffer_limit_bytes": 1_048_576,
    }


def _connection_manager(settings: Settings, endpoints: EnvoyEndpoints) -> Tree:
    waits = (settings.proxy.idle_timeout_secs, settings.server.long_poll_timeout_secs * 2)
    return {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": {
            "@type": f"{_TYPES}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "public",
            "codec_type": "AUTO",
            # The server ends live reads, so the proxy's timeout must be longer than the server's.
            "stream_idle_timeout": _duration(max(*waits, settings.server.sse_reconnect_interval_secs * 2)),
            "request_timeout": "0s",
            "request_headers_timeout": _duration(settings.server.read_timeout_secs),
            "common_http_protocol_options": {
                "idle_timeout": "3600s",
                "headers_with_underscores_action": "DROP_HEADER",
            },
            "max_request_headers_kb": max(1, min(8192, settings.http.max_header_bytes // 1024)),
            # Normalize each path before any check. The policy script decodes slashes as the server does.
            "normalize_path": True,
            "merge_slashes": True,
            "path_with_escaped_slashes_action": "KEEP_UNCHANGED",
            "server_header_transformation": "PASS_THROUGH",
            # The server gets the address of the client, and an id for the request unless the client has sent one.
            "use_remote_address": True,
            "generate_request_id": True,
            "preserve_external_request_id": True,
            "early_header_mutation_extensions": [
                {
                    "name": "envoy.http.early_header_mutation.header_mutation",
                    "typed_config": {
                        "@type": f"{_TYPES}extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
                        "mutations": [{"remove": name} for name in _PROXY_HEADERS],
                    },
                }
            ],
            "http_filters": _filters(settings, endpoints),
            "route_config": {
                "name": "public",
                "virtual_hosts": [_routes(settings, has_shapes=endpoints.shapes is not None)],
            },
            "local_reply_config": {"mappers": _local_replies(settings)},
            "access_log": [_access_log()],
            **tracing(settings.otel),
        },
    }


def _filters(settings: Settings, endpoints: EnvoyEndpoints) -> list[Tree]:
    filters = [_lua("one_token", one_token_script()), _jwt_authn(settings, endpoints)]
    if settings.auth.namespace_claim:
        filters.append(_no_null_namespace(settings.auth.namespace_claim))
    if settings.auth.rate_limit_per_sec:
        filters.append(_rate_limit(settings))
    filters.append(_lua("policy", policy_script(settings.auth, root_aliases=settings.server.root_aliases)))
    filters.append(_filter("router", "router.v3.Router", {}))
    return filters


def _jwt_authn(settings: Settings, endpoints: EnvoyEndpoints) -> Tree:
    auth = settings.auth
    provider: Tree = {
        "issuer": auth.issuer,
        "audiences": list(auth.audience_list),
        "require_expiration": True,
        "clock_skew_seconds": auth.clock_skew_secs,
        "forward": False,
        "from_headers": [{"name": "Authorization", "value_prefix": "Bearer "}],
        "claim_to_headers": [{"header_name": IDENTITY_HEADER, "claim_name": "sub"}],
        "payload_in_metadata": "jwt",
        "normalize_payload_in_metadata": {"space_delimited_claims": ["scope"]},
        # No cache of verified tokens: it would still accept tokens of a retired key.
    }
    if auth.token_in_query:
        provider["from_params"] = ["access_token"]
    if isinstance(endpoints.jwks, Path):
        # Inline, because the user that Envoy runs as may not have access to the key directory.
        provider["local_jwks"] = {"inline_string": endpoints.jwks.read_text(encoding="utf-8")}
    else:
        provider["remote_jwks"] = {
            "http_uri": {"uri": endpoints.jwks, "cluster": "jwks", "timeout": "5s"},
            "cache_duration": _duration(auth.refresh_s),
            "async_fetch": {"failed_refetch_duration": _duration(min(auth.refresh_s, 5.0))},
        }
    worker_actions = {
        "safe_regex": {"regex": "/v1/stream/__ds/subscriptions/[^/]+/(ack|release|callback)"},
        "headers": [{"name": ":method", "string_match": {"exact": "POST"}}],
    }
    rules: list[Tree] = [
        {"match": {"path": "/healthz"}},
        {"match": {"path": "/v1/stream/__ds/jwks.json"}},
        {"match": worker_actions},
    ]
    if auth.open_ui:
        rules += [{"match": {"path": "/"}}, {"match": {"path": "/ui"}}, {"match": {"prefix": "/ui/"}}]
    rules.append({"match": {"prefix": "/"}, "requires": {"provider_name": "tokens"}})
    body = {"providers": {"tokens": provider}, "bypass_cors_preflight": True, "rules": rules}
    return _filter("jwt_authn", "jwt_authn.v3.JwtAuthentication", body)


def _no_null_namespace(claim: str) -> Tree:
    """Reject a namespace claim that is null: Lua cannot distinguish null from missing."""
    is_null = {"filter": _JWT_METADATA, "path": [{"key": "jwt"}, {"key": claim}], "value": {"null_match": {}}}
    denied = {"permissions": [{"any": True}], "principals": [{"metadata": is_null}]}
    return _filter("rbac", "rbac.v3.RBAC", {"rules": {"action": "DENY", "policies": {"bad_namespace": denied}}})


def _rate_limit(settings: Settings) -> Tree:
    auth = settings.auth
    bucket = {
        "max_tokens": auth.rate_limit_burst or auth.rate_limit_per_sec,
        "tokens_per_fill": auth.rate_limit_per_sec,
        "fill_interval": "1s",
    }
    always = {"default_value": {"numerator": 100, "denominator": "HUNDRED"}}
    unlimited = 1_000_000_000  # the bucket that all subjects share must never run empty
    body = {
        "stat_prefix": "subjects",
        "token_bucket": {"max_tokens": unlimited, "tokens_per_fill": unlimited, "fill_interval": "1s"},
        "filter_enabled": always,
        "filter_enforced": always,
        "enable_x_ratelimit_headers": "DRAFT_VERSION_03",
        "max_dynamic_descriptors": _SUBJECTS_MAX,
        "rate_limits": [
            {"actions": [{"request_headers": {"header_name": IDENTITY_HEADER, "descriptor_key": "subject"}}]}
        ],
        "descriptors": [{"entries": [{"key": "subject"}], "token_bucket": bucket}],
        "response_headers_to_add": [
            {"append_action": "OVERWRITE_IF_EXISTS_OR_ADD", "header": {"key": "retry-after", "value": "1"}}
        ],
    }
    return _filter("local_ratelimit", "local_ratelimit.v3.LocalRateLimit", body)


def _routes(settings: Settings, *, has_shapes: bool) -> Tree:
    roots = ["/v1/stream/", "/ds/", *(f"{alias}/" for alias in settings.server.root_aliases)]
    to_streams: Tree = {
        "cluster": "streams",
        "timeout": "0s",
        # Retry only requests that certainly never reached the server.
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset-before-request",
            "num_retries": 3,
            "retry_back_off": {"base_interval": "0.05s", "max_interval": "0.5s"},
        },
    }
    quick = {"cluster": "streams", "timeout": "5s"}
    # It answers to loopback names only, and Envoy is its client here.
    to_shapes = {"cluster": "shapes", "timeout": "0s", "host_rewrite_literal": "127.0.0.1"}
    return {
        "name": "streams",
        "domains": ["*"],
        "routes": [
            *({"match": {"path": page}, "route": quick} for page in ("/healthz", "/readyz", "/metrics")),
            *({"match": {"prefix": root}, "route": to_streams} for root in roots),
            {"match": {"path": "/ds"}, "route": to_streams},
            {"match": {"path": "/"}, "route": quick},
            *([{"match": {"path": "/v1/shape"}, "route": to_shapes}] if has_shapes else []),
            {"match": {"path": "/ui"}, "route": quick},
            {"match": {"prefix": "/ui/"}, "route": quick},
        ],
    }


def _streams_cluster(settings: Settings, endpoints: EnvoyEndpoints) -> Tree:
    server = endpoints.server
    cluster: Tree = {
        "name": "streams",
        "type": "STATIC" if _is_address(server.host) else "STRICT_DNS",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": "streams",
            "endpoints": [
                {
                    "lb_endpoints": [
                        {"endpoint": {"address": _address(node.host, node.port)}}
                        for node in (server, *endpoints.other_nodes)
                    ]
                }
            ],
        },
        **({"health_checks": [_HEALTH_CHECK]} if endpoints.other_nodes else {}),
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": settings.server.max_connections,
                    "max_requests": 1_000_000,
                    "max_pending_requests": 100_000,
                    "max_retries": 1_000,
                }
            ]
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_TYPES}extensions.upstreams.http.v3.HttpProtocolOptions",
                # Shorter than the server's, so that Envoy never sends a request on a connection the server is closing.
                "common_http_protocol_options": {"idle_timeout": _duration(settings.server.idle_timeout_secs * 0.8)},
                "explicit_http_config": {"http_protocol_options": {}},
            }
        },
    }
    if settings.tls.cert_path is not None:
        cluster["transport_socket"] = _upstream_tls(str(settings.tls.cert_path.resolve()), "")
    return cluster


def _shapes_cluster(settings: Settings, upstream: Upstream) -> Tree:
    return {
        "name": "shapes",
        "type": "STATIC" if _is_address(upstream.host) else "STRICT_DNS",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": "shapes",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(upstream.host, upstream.port)}}]}],
        },
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": settings.shapes.max_connections,
                    "max_requests": settings.shapes.max_connections,
                    "max_pending_requests": settings.shapes.max_connections,
                }
            ]
        },
    }


def _url_cluster(name: str, url: str, trusted: Path | None) -> Tree:
    """The server of a URL; `trusted` replaces the certificates of the system."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    endpoint = {"endpoint": {"address": _address(parts.hostname, port)}}
    cluster: Tree = {
        "name": name,
        "type": "STATIC" if _is_address(parts.hostname) else "STRICT_DNS",
        "connect_timeout": "5s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
    if secure:
        cluster["transport_socket"] = _upstream_tls(str(trusted.resolve()) if trusted else _SYSTEM_CA, parts.hostname)
    return cluster


def _upstream_tls(trusted: str, name: str) -> Tree:
    validation: Tree = {"trusted_ca": {"filename": trusted}}
    context: Tree = {
        "@type": f"{_TYPES}extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": {"validation_context": validation},
    }
    if name:
        context["sni"] = name
        validation["match_typed_subject_alt_names"] = [{"san_type": "DNS", "matcher": {"exact": name}}]
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}


def _local_replies(settings: Settings) -> list[Tree]:
    """Format of Envoy's own responses. Envoy applies only the first matching mapper, so each combination needs one."""
    origins = [*_readable_in_browsers(settings), None]
    expired = [_expired(origin) for origin in origins]
    return [*expired, *(origin for origin in origins if origin is not None)]


def _expired(readable: Tree | None) -> Tree:
    """When the token of a long-poll expires, respond 401 (as for the next request) instead of 504."""
    ends_with_token = {"filter": "headwater", "path": [{"key": "ends_with_token"}], "value": {"bool_match": True}}
    is_expired = [
        {"response_flag_filter": {"flags": ["UT"]}},
        {"metadata_filter": {"matcher": ends_with_token, "match_if_key_not_found": False}},
    ]
    problem = {"type": "about:blank", "status": 401, "code": "token_expired", "detail": "The token has expired."}
    challenge = {"header": {"key": "www-authenticate", "value": 'Bearer error="invalid_token"'}}
    filters = is_expired if readable is None else [*is_expired, readable["filter"]]
    return {
        "filter": {"and_filter": {"filters": filters}},
        "status_code": 401,
        "body_format_override": {
            "text_format_source": {"inline_string": json.dumps(problem)},
            "content_type": "application/problem+json",
        },
        "headers_to_add": [challenge, *([] if readable is None else readable["headers_to_add"])],
    }


def _readable_in_browsers(settings: Settings) -> list[Tree]:
    """CORS headers for Envoy's own error responses, so that browsers can read them like the server's."""
    mappers = []
    for origin in settings.http.origins:
        match = {"present_match": True} if origin == "*" else {"string_match": {"exact": origin}}
        headers = {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": "WWW-Authenticate, Retry-After",
            "vary": "Origin",
        }
        added = [{"header": {"key": key, "value": value}} for key, value in headers.items()]
        mappers.append({"filter": {"header_filter": {"header": {"name": "origin", **match}}}, "headers_to_add": added})
    return mappers


def _access_log() -> Tree:
    # The path without its query, which may contain a token.
    what = "%START_TIME% %REQ(:METHOD)% %PATH(NQ:PATH)% %RESPONSE_CODE% %RESPONSE_FLAGS% %DURATION%ms"
    line = f"{what} sub=%REQ({IDENTITY_HEADER})%\n"
    return {
        "name": "envoy.access_loggers.stdout",
        "typed_config": {
            "@type": f"{_TYPES}extensions.access_loggers.stream.v3.StdoutAccessLog",
            "log_format": {"text_format_source": {"inline_string": line}},
        },
    }


def _lua(name: str, script: str) -> Tree:
    return {**_filter("lua", "lua.v3.Lua", {"default_source_code": {"inline_string": script}}), "name": f"lua.{name}"}


def _filter(name: str, kind: str, body: Tree) -> Tree:
    return {"name": f"{_FILTERS}{name}", "typed_config": {"@type": f"{_TYPES}extensions.filters.http.{kind}", **body}}


def _address(host: str, port: int) -> Tree:
    return {"socket_address": {"address": "127.0.0.1" if host == "localhost" else host, "port_value": port}}


def _is_address(host: str) -> bool:
    return host == "localhost" or ":" in host or host.replace(".", "").isdigit()


def _duration(seconds: float) -> str:
    return f"{seconds:.3f}s"
