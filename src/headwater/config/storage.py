"""Settings for storage: the mode, the data directory, the journal and the object store."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from headwater.config.values import Bytes, Count, OptionalPath, SecondsOrOff, SettingsSection, takes


class StorageSettings(SettingsSection):
    """Where and how data is stored."""

    mode: Literal["memory", "file-fast", "file-durable", "acid", "cluster"] = Field(
        "memory",
        description="`memory`, `file-fast` (no fsync), `file-durable` (group commit), `acid` (LMDB; alias `redb`),"
        " `cluster` (Postgres and an object store).",
    )
    data_dir: Path = Field(Path("./data/streams"), description="Data directory of the modes that store on disk.")
    journal_dir: OptionalPath = Field(
        None,
        description="Directory of the journal, on a separate disk. Unset: within `data_dir`. The journal is moved there"
        " at startup.",
    )
    acid_shard_count: Count = Field(
        16,
        ge=1,
        le=256,
        description="Database shards in `acid` mode.",
        json_schema_extra=takes("a power of two from 1 to 256"),
    )
    hot_tail_bytes: Bytes = Field(
        67_108_864, description="Memory for the newest data of all streams in the file modes."
    )
    segment_bytes: Bytes = Field(
        67_108_864, ge=65_536, description="Maximum size of a journal segment in the file modes."
    )
    acid_map_bytes: Bytes = Field(
        1_099_511_627_776,
        ge=1_048_576,
        description="Maximum size of one `acid` database. Only address space is reserved; the file grows as needed.",
    )
    cold: str | None = Field(
        None,
        description="Object store for the packs and snapshots of `file-durable` and `cluster`, as `s3://bucket/prefix`;"
        " the local disk is then a cache. Address, region and keys come from the environment (`AWS_ENDPOINT_URL`,"
        " `AWS_REGION`, `AWS_ACCESS_KEY_ID`, …). Unset: everything stays on the local disk.",
    )
    cold_cache_bytes: Bytes = Field(
        1_073_741_824,
        ge=1_048_576,
        description="With `cold`: local disk space for data that is also in the object store.",
    )
    cold_backlog_bytes: Bytes = Field(
        4_294_967_296,
        ge=1_048_576,
        description="With `cold`: how much data may wait on the local disk while the object store is unavailable;"
        " beyond it writes get 503.",
    )
    cold_grace_secs: SecondsOrOff = Field(
        3600.0,
        description="With `cold`: how long an object that is no longer needed stays in the store.",
    )
    accept_data_loss: bool = Field(
        False,
        description="With `cold`: start from only the object store if the data directory is lost. Data that was not"
        " stored there yet is lost. Prefer the flag `--accept-data-loss`, for a single start.",
    )
    commit: Literal["auto", "inline", "thread"] = Field(
        "auto",
        description="Where commits run: on the event loop, on a thread, or (`auto`) chosen for each batch: large"
        " batches, and all of them while the disk is slow, go to the thread.",
    )
    max_batch_bytes: Bytes = Field(
        16_777_216,
        ge=65_536,
        le=1_073_741_824,
        description="Maximum data of one commit. More data is committed in several steps; a single larger request is"
        " committed alone.",
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _redb_is_acid(cls, value: object) -> object:
        return "acid" if value == "redb" else value

    @model_validator(mode="after")
    def _cold_is_of_file_durable(self) -> StorageSettings:
        if self.cold is not None and self.mode not in ("file-durable", "cluster"):
            raise ValueError(f"cold needs mode file-durable or cluster, not {self.mode}")
        return self

    @field_validator("acid_shard_count")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("not a power of two")
        return value
