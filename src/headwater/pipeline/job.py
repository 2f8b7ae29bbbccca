"""What a job of the pipeline is: a name, and a streaming query that can be started again from where it was.

Invariant: a job's checkpoint lies under its own name in the environment' checkpoint directory, so that jobs of one
application never share state, and a job keeps its place when others are added or removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from headwater.spark.options import ConnectionOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True, slots=True)
class JobEnvironment:
    """What every job of an application works with."""

    streams: str
    """The stream root of the server, such as `http://localhost:4437/v1/stream`."""
    checkpoints: str
    """Where checkpoints lie: a directory, or any address that Spark can write to."""
    token: str = field(default="", repr=False)
    """Sent as bearer token to the server; empty sends none."""
    postgres: str = field(default="", repr=False)
    """The address of the database, for the jobs that need one."""
    ca_file: str = ""
    """PEM certificates to trust the server by, on every node; empty takes the system's."""
    electric: str = field(default="", repr=False)
    """The address of Electric, with its secret, for the jobs that read from it."""

    @property
    def options(self) -> dict[str, str]:
        """Where the server is, as options of the Spark source and sink."""
        return {"url": self.streams, "token": self.token, "caFile": self.ca_file}

    def connection(self, bucket: str = "", retry_timeout_s: float = 120.0) -> ConnectionOptions:
        """The same for requests outside of a query."""
        root = self.streams.rstrip("/")
        return ConnectionOptions(root, bucket, self.token, ca_file=self.ca_file, retry_timeout_s=retry_timeout_s)

    def checkpoint(self, name: str) -> str:
        """Where the job of this name keeps its place."""
        return f"{self.checkpoints.rstrip('/')}/{name}"


class Job(Protocol):
    """One configured piece of work."""

    @property
    def name(self) -> str:
        """Unique within an application; names the query, its checkpoint and its metrics."""

    @property
    def source(self) -> str:
        """What it reads, for people."""

    @property
    def target(self) -> str:
        """What it writes, for people."""

    def start(self, spark: SparkSession, environment: JobEnvironment) -> StreamingQuery:
        """Start the query, or go on where it was."""
