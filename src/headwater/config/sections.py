"""All settings: one frozen model per section, one `Field` per key with default, limits and purpose.

To add a key, add a `Field` with a description here, or in the module of its section (`stack`, `storage`, …); files,
environment variables, `headwater config show` and the table in `docs/configuration.md` are derived from it. Invariant:
defaults follow the same rules as configured values.
"""

from __future__ import annotations

import re
from ipaddress import ip_network
from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from headwater.config.cluster import ClusterSettings
from headwater.config.filters import LogFilter
from headwater.config.otel import OtelSettings
from headwater.config.quotas import QuotasSettings
from headwater.config.shapes import ShapesSettings
from headwater.config.stack import AuthSettings, ProxySettings, StackSettings
from headwater.config.storage import StorageSettings
from headwater.config.subscriptions import SubscriptionsSettings
from headwater.config.values import (
    AgeOrOff,
    Bytes,
    BytesOrOff,
    Count,
    CountOrAuto,
    OptionalBytes,
    OptionalPath,
    Seconds,
    SecondsOrOff,
    SettingsSection,
    check_web_origin,
    split,
    takes,
)
from headwater.operating_system import SYSTEM

VARIABLE_PREFIX = "DS_"
VARIABLE_SEPARATOR = "__"
"""A setting `key` of `section` is the environment variable `DS_SECTION__KEY`."""

MEMORY_MODE_MAX_STREAM_BYTES = 10 * 1024 * 1024

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#,*]+", re.IGNORECASE)

_STREAM_ROOT = "/v1/stream"
_ROOT = re.compile(r"(/[A-Za-z0-9._~-]+)+", re.ASCII)
_OTHER_PATHS = ("/ds", "/ui", "/healthz", "/readyz", "/metrics", "/v1/shape")
_LOOPBACK_HOST = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1", re.IGNORECASE | re.ASCII)


class ServerSettings(SettingsSection):
    """The listening socket, and the timeouts of its connections."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on. `0.0.0.0` opens it to the network.")
    port: Count = Field(4437, ge=0, le=65535, description="TCP port to listen on; 0 picks a free one.")
    long_poll_timeout_secs: Seconds = Field(
        30.0, description="Maximum time that a long-poll waits for data before it returns 204."
    )
    sse_reconnect_interval_secs: SecondsOrOff = Field(
        60.0,
        description="Time after which the server ends an SSE response, so that caches and proxies can combine"
        " readers. 0: never.",
    )
    read_timeout_secs: Seconds = Field(
        30.0, description="A request must be received completely within this time, otherwise 408."
    )
    idle_timeout_secs: Seconds = Field(75.0, description="Time after which an idle connection is closed.")
    write_timeout_secs: Seconds = Field(
        60.0, description="A connection is closed if its client does not read the response for this long."
    )
    drain_timeout_secs: SecondsOrOff = Field(
        10.0, description="Maximum time that a shutdown waits for requests in progress."
    )
    allowed_hosts: str = Field(
        "",
        description="Accepted host names, comma-separated, in addition to loopback names; `*` accepts all, and"
        " `proxied` all with another port than that of this server, which a proxy in front of it passes on. Empty: only"
        " loopback names if the server listens on a loopback address, otherwise all.",
        json_schema_extra=takes("`*`, `proxied`, or a comma-separated list of names like streams.example.com"),
    )
    roots: str = Field(
        "/v1/stream",
        description="Paths below which streams are served, comma-separated. `/v1/stream` is always one of them; others"
        " are aliases of it: the same streams under the same policy.",
        json_schema_extra=takes("a comma-separated list of paths like /v1/stream,/streams"),
    )
    public_url: str = Field(
        "",
        description="Public URL of this server, for `Location` and webhook callbacks. Empty: the URL that each client"
        " used.",
        json_schema_extra=takes("empty, or a URL like https://streams.example.com"),
    )
    trusted_proxies: str = Field(
        "",
        description="Addresses or networks of proxies, comma-separated, whose `Forwarded` and `X-Forwarded-*` headers"
        " are trusted, for `Location` and the access log. Headers of other peers are ignored.",
        json_schema_extra=takes("a comma-separated list of addresses or networks like 127.0.0.1, 10.0.0.0/8"),
    )
    max_connections: Count = Field(
        10_000,
        ge=1,
        le=1_000_000,
        description="Maximum number of connections; more get 503. Fewer if the limit on open files (`ulimit -n`) does"
        " not allow as many; the number is then logged.",
    )

    workers: CountOrAuto = Field(
        1,
        ge=0,
        le=256,
        description="Number of server processes, each the owner of some shards. `auto` (0): one per core, if"
        " there are as many shards.",
        json_schema_extra=takes("`auto`, or a whole number from 1 to 256"),
    )
    worker_timeout_secs: Seconds = Field(
        10.0,
        description="A worker that does not respond to the supervisor for this long is killed and replaced. While it"
        " starts, it may take three times as long.",
    )
    worker_wait_secs: SecondsOrOff = Field(
        10.0,
        description="How long a request waits while the worker that owns its stream is restarted, before it gets 503.",
    )

    @field_validator("public_url")
    @classmethod
    def _check_public_url(cls, value: str) -> str:
        return check_web_origin(value)

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, value: str) -> str:
        for network in split(value):
            try:
                ip_network(network, strict=False)
            except ValueError:
                raise ValueError(f"{network!r} is not an address or a network") from None
        return value

    @property
    def proxies(self) -> tuple[str, ...]:
        """The trusted proxies."""
        return split(self.trusted_proxies)

    @field_validator("roots")
    @classmethod
    def _check_roots(cls, value: str) -> str:
        roots = {_STREAM_ROOT, *split(value)}
        for root in roots:
            if _ROOT.fullmatch(root) is None or {".", ".."} & set(root.split("/")):
                raise ValueError(
                    f"{root!r} is not a path like /v1/stream: letters, digits, '-', '_', '.', '~' and slashes"
                )
            for other in {*roots, *_OTHER_PATHS} - {root}:
                if root.startswith(f"{other}/") or other.startswith(f"{root}/"):
                    raise ValueError(f"{root!r} and {other!r} overlap")
            if root in _OTHER_PATHS:
                raise ValueError(f"{root!r} is reserved")
        return value

    @property
    def root_aliases(self) -> tuple[str, ...]:
        """The roots other than `/v1/stream`."""
        return tuple(root for root in dict.fromkeys(split(self.roots)) if root != _STREAM_ROOT)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The allowed host names."""
        return split(self.allowed_hosts)

    @property
    def worker_count(self) -> int:
        """How many workers to run."""
        return self.workers or (SYSTEM.processors() if SYSTEM.has_workers else 1)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return _LOOPBACK_HOST.fullmatch(self.host) is not None


class HttpSettings(SettingsSection):
    """CORS, caching, and the size of requests."""

    cors_origins: str = Field(
        "",
        description="Origins whose web pages can read and write, comma-separated, in addition to the server's own. `*`"
        " allows all: every page that a user visits can then use this server.",
        json_schema_extra=takes("`*`, or a comma-separated list of origins like https://app.example.com"),
    )
    loopback_origins: bool = Field(
        True,
        description="Also allow pages on loopback addresses, such as a development server on http://localhost:5173."
        " Off in the `prod` profile.",
    )
    cache_control: Literal["no-store", "private", "public"] = Field(
        "no-store",
        description="`Cache-Control` of reads. With `private` and `public` only full chunks below the tail and"
        " long-polls that return data may be cached, and never beyond the end of the stream.",
    )
    compression: bool = Field(
        True,
        description="Compress catch-up reads of JSON and text of at least 1,024 bytes, for clients that accept zstd,"
        " gzip or deflate.",
    )
    compress_events: bool = Field(
        False,
        description="Compress server-sent events too. It costs processor time and about 300 KiB of memory for each"
        " reader, because compressed events cannot be shared.",
    )
    max_header_bytes: Bytes = Field(32_768, ge=1024, description="Maximum size of all headers together; more is 431.")
    max_url_bytes: Bytes = Field(8_192, ge=256, description="Maximum length of the request target; longer is 414.")
    max_body_bytes: Bytes = Field(67_108_864, description="Maximum size of a request body; larger is 413.")

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: str) -> str:
        for origin in split(value):
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not a valid origin")
        return value

    @property
    def origins(self) -> tuple[str, ...]:
        """The allowed origins; `("*",)` if all are allowed."""
        found = split(self.cors_origins)
        return ("*",) if "*" in found else found


class LimitsSettings(SettingsSection):
    """Limits on what clients may send and store; beyond them the response is 413 (400 for a name)."""

    max_memory_bytes: Bytes = Field(
        104_857_600,
        description="Memory for all streams together. In `memory` mode it includes messages, snapshots and metadata"
        " (about 1.5 KiB for each stream), and more is 413. In the other modes messages are on disk; there it limits"
        " `storage.hot_tail_bytes`, and `limits.max_metadata_bytes` limits the metadata.",
    )
    max_metadata_bytes: BytesOrOff = Field(
        536_870_912,
        description="Memory for metadata in the modes other than `memory`: about 1.5 KiB for each stream, 0.5 KiB for"
        " each producer or document. New streams, producers and buckets beyond it are 413. 0: no limit.",
    )
    max_stream_bytes: OptionalBytes = Field(
        None,
        description="Maximum size of one stream; 0: no limit. Unset: 10485760 in `memory` mode, otherwise no limit.",
        json_schema_extra=takes("a whole number of bytes, 0 for no limit, or empty for the mode's default"),
    )
    max_request_bodies_bytes: Bytes = Field(
        268_435_456,
        description="Memory for the request bodies of all connections, and for pipelined requests that wait; more is"
        " 503 with `Retry-After`. A snapshot counts with at most 1 MiB, because it is written to disk while it"
        " arrives.",
    )
    max_unread_bytes: Bytes = Field(
        268_435_456,
        description="Memory for responses that clients have not read, of all connections. Beyond it, the clients that"
        " have not read for longest are disconnected.",
    )
    max_append_messages: Count = Field(
        100_000,
        ge=1,
        le=10_000_000,
        description="Maximum number of messages in one append to a JSON stream; more is 413.",
    )
    max_json_message_bytes: Bytes = Field(
        16_777_216,
        ge=65_536,
        description="Maximum size of one message in a JSON body above 1 MiB; larger is 413. The check of one message"
        " cannot be interrupted, so it must be short.",
    )
    max_chunk_bytes: Bytes = Field(
        4_194_304,
        description="Maximum size of one read. It ends at a message boundary; a larger message is returned alone.",
    )
    max_name_bytes: Count = Field(
        1_024, ge=1, le=65_535, description="Maximum length of a stream name, percent-decoded, in UTF-8."
    )
    max_snapshot_bytes: Bytes = Field(
        1_073_741_824,
        description="Maximum size of a snapshot; larger is 413. Only `memory` mode holds it in memory.",
    )
    max_fork_depth: Count = Field(
        1_000,
        ge=1,
        le=1_000_000,
        description="Maximum depth of forks of forks; deeper is 409. Each level that a read touches takes some"
        " microseconds.",
    )
    max_producers_per_stream: Count = Field(
        100_000,
        ge=1,
        le=100_000_000,
        description="Maximum number of producer ids of one stream. At the limit, a new one replaces producers that"
        " have been idle for `producer_idle_days`; if there is none, it is 413.",
    )
    producer_idle_days: Count = Field(
        7,
        ge=7,
        le=3650,
        description="Days without an append after which a stream at the limit may forget a producer. If that producer"
        " retries an append after this time, the append may be stored twice.",
    )
    max_follows: Count = Field(
        1_000, ge=1, le=1_000_000, description="Maximum number of followers of many streams; more is 503."
    )
    max_followed_streams: Count = Field(
        100_000,
        ge=1,
        le=10_000_000,
        description="Maximum number of streams that followers of many streams follow together; more is 413. Each"
        " takes about 0.5 KiB. Ends of streams count until the client has read them. As many new streams may wait to"
        " be announced to them.",
    )
    max_leases: Count = Field(
        10_000, ge=1, le=10_000_000, description="Maximum number of writer leases of all streams; more is 413."
    )
    max_lease_secs: Seconds = Field(
        3600.0, ge=1, description="Longest time that a writer lease may last without renewal; longer is 400."
    )


class TlsSettings(SettingsSection):
    """TLS of the server itself. Unset: plain HTTP."""

    cert_path: OptionalPath = Field(None, description="PEM certificate chain. Set together with `key_path`.")
    key_path: OptionalPath = Field(None, description="PEM private key. Set together with `cert_path`.")
    client_ca_path: OptionalPath = Field(
        None,
        description="PEM certificates of authorities (mutual TLS). Clients must present a certificate that one of them"
        " has signed; others cannot connect. Unset: no client certificate is needed.",
    )

    @model_validator(mode="after")
    def _both_or_none(self) -> TlsSettings:
        if (self.cert_path is None) != (self.key_path is None):
            raise ValueError("set both cert_path and key_path, or neither")
        if self.client_ca_path is not None and self.cert_path is None:
            raise ValueError("client_ca_path needs cert_path and key_path")
        return self

    @property
    def enabled(self) -> bool:
        return self.cert_path is not None


class LogSettings(SettingsSection):
    """Logging to stderr."""

    rust_log: str = Field(
        "info",
        validation_alias=AliasChoices("rust_log", "level"),
        description="Level, or a list like `warn,headwater.http=debug`. The variable `RUST_LOG` overrides it.",
        json_schema_extra=takes("trace, debug, info, warn, error or off, or a list like info,headwater.http=debug"),
    )
    format: Literal["text", "json"] = Field("text", description="Text lines, or one JSON object per line.")

    @field_validator("rust_log")
    @classmethod
    def _check_filter(cls, value: str) -> str:
        LogFilter.parse(value)
        return value

    @property
    def filter(self) -> LogFilter:
        return LogFilter.parse(self.rust_log)


class RegistrySettings(SettingsSection):
    """The `__registry__` stream that lists streams for browsers."""

    enabled: bool = Field(False, description="Maintain `__registry__`, a stream of all creations and deletions.")


class ExpirySettings(SettingsSection):
    """The background sweep of expired streams."""

    sweep_interval_secs: Seconds = Field(
        1.0,
        description="Interval at which expired streams are deleted. On access they are treated as deleted immediately.",
    )
    clock_jump_secs: AgeOrOff = Field(
        3600.0,
        description="A clock that is suddenly ahead by more than this (at startup, after a suspend) has jumped: streams"
        " that expired by it return 404, but their data is kept for `clock_jump_grace_secs`. 0: delete it.",
    )
    clock_jump_grace_secs: AgeOrOff = Field(
        86_400.0,
        description="How long data that expired by a clock jump is kept, unless `headwater store confirm-expiry`"
        " deletes it earlier.",
    )


class CursorSettings(SettingsSection):
    """The cursor that keeps caches from serving the same live response twice."""

    interval_secs: Count = Field(20, ge=1, le=3600, description="Length of one cursor step.")


class RetentionSettings(SettingsSection):
    """When old messages of streams are dropped."""

    max_age_secs: AgeOrOff = Field(
        0.0,
        description="Drop messages older than this if dropping is allowed; 0 keeps all. A stream can override it"
        " (`Stream-Retention-Age`).",
    )
    max_bytes: BytesOrOff = Field(
        0,
        description="Keep this much of each stream and drop older messages if that is allowed; 0 keeps all. A stream"
        " can override it (`Stream-Retention-Bytes`).",
    )
    drop_uncovered: bool = Field(
        False,
        description="Allow age and size limits to drop messages that no snapshot covers, unless the stream overrides it"
        " (`Stream-Retention-Drop`). A stream with a snapshot keeps the messages after it until the next snapshot.",
    )


class Settings(BaseModel):
    """All settings. `Settings()` has the built-in defaults; `load_settings` adds files and the environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: ServerSettings = ServerSettings()
    http: HttpSettings = HttpSettings()
    limits: LimitsSettings = LimitsSettings()
    storage: StorageSettings = StorageSettings()
    tls: TlsSettings = TlsSettings()
    log: LogSettings = LogSettings()
    registry: RegistrySettings = RegistrySettings()
    expiry: ExpirySettings = ExpirySettings()
    cursor: CursorSettings = CursorSettings()
    subscriptions: SubscriptionsSettings = SubscriptionsSettings()
    retention: RetentionSettings = RetentionSettings()
    auth: AuthSettings = AuthSettings()
    proxy: ProxySettings = ProxySettings()
    stack: StackSettings = StackSettings()
    shapes: ShapesSettings = ShapesSettings()
    quotas: QuotasSettings = QuotasSettings()
    otel: OtelSettings = OtelSettings()
    cluster: ClusterSettings = ClusterSettings()

    @property
    def hot_tail_bytes(self) -> int:
        """How much of the newest data the file modes keep in memory."""
        return min(self.storage.hot_tail_bytes, self.limits.max_memory_bytes)

    @property
    def max_stream_bytes(self) -> int | None:
        """The effective limit per stream, `None` for no limit; the default depends on the storage mode."""
        if self.limits.max_stream_bytes is None:
            return MEMORY_MODE_MAX_STREAM_BYTES if self.storage.mode == "memory" else None
        return self.limits.max_stream_bytes or None
