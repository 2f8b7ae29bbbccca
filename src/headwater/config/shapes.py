"""The settings of `headwater shapes`, which serves tables of Postgres by Electric's Shape API."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from headwater.config.values import Bytes, Count, Seconds, SecondsOrOff, SettingsSection, split, takes

_TABLE = re.compile(r"(?:[^\s.,]+\.)?[^\s.,]+")
_SLOT = re.compile(r"[a-z0-9_]{1,63}")


class ShapesSettings(SettingsSection):
    """Tables of Postgres as shapes (`headwater shapes`)."""

    host: str = Field(
        "127.0.0.1", min_length=1, description="Address to listen on. Envoy asks for tokens; this does not."
    )
    port: Count = Field(3000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    tables: str = Field(
        "",
        description="Tables that are served, comma-separated, such as `items, shop.orders`; no other is.",
        json_schema_extra=takes("a comma-separated list of tables, each with its schema unless that is public"),
    )
    secret: str = Field("", description="What requests must send as `secret`, as Electric asks for it. Empty: nothing.")
    allow_delete: bool = Field(False, description="Whether `DELETE /v1/shape` may drop a shape.")
    max_shapes: Count = Field(
        500, ge=1, le=100_000, description="Shapes that exist at once. Each condition that a client thinks of is one."
    )
    idle_secs: Seconds = Field(86_400.0, description="A shape that nobody reads for this long is dropped.")
    evict_after_secs: Seconds = Field(
        60.0,
        description="At `max_shapes`, one that nobody reads for this long makes room for a new one; if there is none,"
        " the request is refused with 503.",
    )
    max_log_bytes: Bytes = Field(
        268_435_456, description="Changes in the log of one shape; beyond it, readers start with a new snapshot."
    )
    tail_bytes: Bytes = Field(262_144, description="Newest changes of each shape that are kept in memory.")
    chunk_bytes: Bytes = Field(1_048_576, description="About how much one response has at most.")
    max_subset_bytes: Bytes = Field(33_554_432, description="Largest answer to a subset; more is refused with 400.")
    long_poll_timeout_secs: Seconds = Field(
        20.0, description="How long a live request waits before it is answered with `up-to-date` alone."
    )
    sse_timeout_secs: Seconds = Field(
        60.0, description="After this an event stream ends, and the client opens the next."
    )
    keep_alive_secs: Seconds = Field(21.0, description="Time between comments on a quiet event stream.")
    ready_timeout_secs: SecondsOrOff = Field(
        5.0, description="How long a request waits for Postgres to come back before it is refused with 503."
    )
    check_interval_secs: Seconds = Field(
        10.0, description="Time between checks for idle shapes and for tables that were altered."
    )
    max_connections: Count = Field(
        10_000, ge=1, le=1_000_000, description="Requests and connections at once; more are refused with 503."
    )
    slot: str = Field(
        "headwater_shapes", description="The replication slot. All shapes share it; one process may use it."
    )
    publication: str = Field("headwater_shapes", min_length=1, max_length=63, description="The publication.")

    @field_validator("tables")
    @classmethod
    def _check_tables(cls, value: str) -> str:
        for table in split(value):
            if not _TABLE.fullmatch(table):
                raise ValueError(f"{table!r} is not the name of a table")
        return value

    @field_validator("slot")
    @classmethod
    def _check_slot(cls, value: str) -> str:
        if not _SLOT.fullmatch(value):
            raise ValueError("a slot has a name of lower-case letters, digits and underscores")
        return value

    @property
    def table_list(self) -> tuple[str, ...]:
        return split(self.tables)
