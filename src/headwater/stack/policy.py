"""The Lua scripts that Envoy runs on every request, before and after it checks the token.

Invariant: settings are inserted as escaped literals, so no value can inject code.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from headwater.config import AuthSettings

IDENTITY_HEADER: Final = "x-jwt-sub"
SCOPE_HEADERS: Final = ("x-headwater-namespace", "x-headwater-reserved")
"""Headers with a token's permissions, for requests that name streams outside their path (`http.scopes`)."""


def one_token_script() -> str:
    """Return the script that rejects requests with several tokens. It runs before Envoy checks the token."""
    return files("headwater.stack").joinpath("one_token.lua").read_text(encoding="utf-8")


def policy_script(auth: AuthSettings, *, root_aliases: tuple[str, ...] = ()) -> str:
    """Return the script that authorizes requests."""
    values: dict[str, str | int | bool | tuple[str, ...]] = {
        "identity_header": IDENTITY_HEADER,
        "clock_skew_secs": auth.clock_skew_secs,
        "require_scopes": auth.require_scopes,
        "namespace_claim": auth.namespace_claim,
        "require_namespace": auth.require_namespace,
        "open_reserved": auth.open_reserved,
        "open_ui": auth.open_ui,
        "root_aliases": root_aliases,
    }
    table = ", ".join(f"{name} = {_literal(value)}" for name, value in values.items())
    script = files("headwater.stack").joinpath("policy.lua").read_text(encoding="utf-8")
    return f"local POLICY = {{ {table} }}\n{script}"


def _literal(value: str | int | bool | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return "{ " + ", ".join(_literal(each) for each in value) + " }"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return '"' + "".join(f"\\{byte:03d}" for byte in value.encode("utf-8")) + '"'
