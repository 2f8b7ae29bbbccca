"""The settings of `headwater shapes`, which serves Postgres tables through Electric's Shape API."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from headwater.config.values import Bytes, Count, Seconds, SecondsOrOff, SettingsSection, split, takes

_TABLE = re.compile(r"(?:[^\s.,]+\.)?[^\s.,]+")
_SLOT = re.compile(r"[a-z0-9_]{1,63}")


class ShapesSettings(SettingsSection):
    """Postgres tables as shapes (`headwater shapes`)."""

    host: str = Field(
        "127.0.0.1", min_length=1, description="Address to listen on. Tokens are checked by Envoy, not here."
    )
    port: Count = Field(3000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    tables: str = Field(
        "",
        description="The tables to serve, comma-separated, such as `items, shop.orders`.",
        json_schema_extra=takes("a comma-separated list of tables, each with its schema unless that is public"),
    )
    secret: str = Field("", description="Requests must send this as `secret`, as with Electric. Empty: no secret.")
    allow_delete: bool = Field(False, description="Allow `DELETE /v1/shape` to drop a shape.")
    max_shapes: Count = Field(
        500, ge=1, le=100_000, description="Maximum number of shapes. Each distinct condition of a client is one."
    )
    idle_secs: Seconds = Field(86_400.0, description="A shape that is not read for this long is dropped.")
    evict_after_secs: Seconds = Field(
        60.0,
        description="At `max_shapes`, a shape that was not read for this long is replaced by a new one; if there is"
        " none, the request gets 503.",
    )
    max_log_bytes: Bytes = Field(
        268_435_456,
        description="Maximum size of the changes of one shape; beyond it, readers start with a new snapshot.",
    )
    tail_bytes: Bytes = Field(262_144, description="Memory for the newest changes of each shape.")
    chunk_bytes: Bytes = Field(1_048_576, description="Approximate maximum size of one response.")
    max_subset_bytes: Bytes = Field(33_554_432, description="Maximum size of the response to a subset; larger is 400.")
    long_poll_timeout_secs: Seconds = Field(
        20.0, description="Maximum time that a live request waits for changes; then it returns only `up-to-date`."
    )
    sse_timeout_secs: Seconds = Field(
        60.0, description="Time after which an event stream ends; the client opens a new one."
    )
    keep_alive_secs: Seconds = Field(21.0, description="Interval of comments on an idle event stream.")
    ready_timeout_secs: SecondsOrOff = Field(
        5.0, description="Maximum time that a request waits for Postgres to become available; then it gets 503."
    )
    check_interval_secs: Seconds = Field(10.0, description="Interval of checks for idle shapes and altered tables.")
    max_connections: Count = Field(
        10_000, ge=1, le=1_000_000, description="Maximum number of concurrent requests and connections; more get 503."
    )
    slot: str = Field(
        "headwater_shapes", description="The replication slot. All shapes share it, and only one process can use it."
    )
    publication: str = Field("headwater_shapes", min_length=1, max_length=63, description="The publication.")

    @field_validator("tables")
    @classmethod
    def _check_tables(cls, value: str) -> str:
        for table in split(value):
            if not _TABLE.fullmatch(table):
                raise ValueError(f"{table!r} is not a valid table name")
        return value

    @field_validator("slot")
    @classmethod
    def _check_slot(cls, value: str) -> str:
        if not _SLOT.fullmatch(value):
            raise ValueError("a slot name consists of lower-case letters, digits and underscores")
        return value

    @property
    def table_list(self) -> tuple[str, ...]:
        return split(self.tables)
