"""The Lua scripts that Envoy runs on every request, before and after tokens are checked, with their settings.

Invariant: a setting reaches the script as a literal that it cannot break out of.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from headwater.config import Auth

IDENTITY_HEADER: Final = "x-jwt-sub"


def one_token_script() -> str:
    """Refuse a request with several tokens. Runs before tokens are checked and removed."""
    return files("headwater.stack").joinpath("one_token.lua").read_text(encoding="utf-8")


def policy_script(auth: Auth, shards: int, *, checks_tokens: bool) -> str:
    """Judge what a valid token may do. Without `checks_tokens` the script only finds the shard of a stream."""
    values: dict[str, str | int | bool] = {
        "checks_tokens": checks_tokens,
        "identity_header": IDENTITY_HEADER,
        "clock_skew_secs": auth.clock_skew_secs,
        "require_scopes": auth.require_scopes,
        "namespace_claim": auth.namespace_claim,
        "require_namespace": auth.require_namespace,
        "open_reserved": auth.open_reserved,
        "open_ui": auth.open_ui,
        "shards": shards,
    }
    table = ", ".join(f"{name} = {_literal(value)}" for name, value in values.items())
    script = files("headwater.stack").joinpath("policy.lua").read_text(encoding="utf-8")
    return f"local POLICY = {{ {table} }}\n{script}"


def _literal(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return '"' + "".join(f"\\{byte:03d}" for byte in value.encode("utf-8")) + '"'
