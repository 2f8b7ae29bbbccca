"""The policy that Envoy runs on every request with a valid token: the Lua text, with the settings in front of it.

Invariant: a setting reaches the script as a literal that it cannot break out of.
"""

from __future__ import annotations

from importlib.resources import files

from headwater.config import Auth


def policy_script(auth: Auth, shards: int, *, checks_tokens: bool) -> str:
    """What the Lua filter runs; without `checks_tokens` it only finds the shard of a stream."""
    values: dict[str, str | int | bool] = {
        "checks_tokens": checks_tokens,
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
