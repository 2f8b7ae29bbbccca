"""Settings: the sections and keys (`sections`), loading them (`layers`), and log filters (`filters`).

Invariant: a `Settings` object is complete and valid, so code that uses it does not check values again.
"""

from headwater.config.cluster import ClusterSettings
from headwater.config.errors import ConfigError
from headwater.config.filters import LogFilter
from headwater.config.layers import LoadedSettings, load_settings
from headwater.config.otel import OtelSettings
from headwater.config.sections import (
    CursorSettings,
    ExpirySettings,
    HttpSettings,
    LimitsSettings,
    LogSettings,
    RegistrySettings,
    RetentionSettings,
    ServerSettings,
    Settings,
    TlsSettings,
)
from headwater.config.shapes import ShapesSettings
from headwater.config.stack import AuthSettings, ProxySettings, StackSettings
from headwater.config.storage import StorageSettings
from headwater.config.subscriptions import SubscriptionsSettings

__all__ = [
    "AuthSettings",
    "ClusterSettings",
    "ConfigError",
    "CursorSettings",
    "ExpirySettings",
    "HttpSettings",
    "LimitsSettings",
    "LoadedSettings",
    "LogFilter",
    "LogSettings",
    "OtelSettings",
    "ProxySettings",
    "RegistrySettings",
    "RetentionSettings",
    "ServerSettings",
    "Settings",
    "ShapesSettings",
    "StackSettings",
    "StorageSettings",
    "SubscriptionsSettings",
    "TlsSettings",
    "load_settings",
]
