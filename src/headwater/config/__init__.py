"""Settings: what there is (`sections`), where values come from (`layers`), what a log filter is (`filters`).

Invariant: a `Settings` object in hand is complete and valid; nothing that uses it checks a value again.
"""

from headwater.config.filters import LogFilter
from headwater.config.layers import LoadedSettings, load_settings
from headwater.config.sections import (
    Cursor,
    Expiry,
    Http,
    Limits,
    Log,
    Registry,
    Retention,
    Server,
    Settings,
    Storage,
    Subscriptions,
    Tls,
)
from headwater.config.shapes import Shapes
from headwater.config.stack import Auth, Proxy, Stack
from headwater.config.trouble import ConfigError

__all__ = [
    "Auth",
    "ConfigError",
    "Cursor",
    "Expiry",
    "Http",
    "Limits",
    "LoadedSettings",
    "Log",
    "LogFilter",
    "Proxy",
    "Registry",
    "Retention",
    "Server",
    "Settings",
    "Shapes",
    "Stack",
    "Storage",
    "Subscriptions",
    "Tls",
    "load_settings",
]
