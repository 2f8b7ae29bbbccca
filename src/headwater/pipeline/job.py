"""The interface of jobs: a name, and a streaming query that continues from its checkpoint.

Invariant: a job's checkpoint is under its name in the checkpoint directory, so that jobs of one application never share
state, and a job continues when others are added or removed.
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
    """Addresses, credentials and the checkpoint directory, shared by all jobs of an application."""

    streams: str
    """The stream root of the server, such as `http://localhost:4437/v1/stream`."""
    checkpoints: str
    """The checkpoint directory, or any address that Spark can write to."""
    token: str = field(default="", repr=False)
    """Sent to the server as bearer token, unless empty."""
    postgres: str = field(default="", repr=False)
    """The address of the database, for the jobs that need one."""
    ca_file: str = ""
    """PEM file of CA certificates, on every node; if empty, the system's certificates."""
    electric: str = field(default="", repr=False)
    """The address of Electric, with its secret, for the jobs that read from it."""
    otel_endpoint: str = ""
    """Where spans are sent; if empty, they are not sent."""
    otel_sample_ratio: float = 1.0

    @property
    def options(self) -> dict[str, str]:
        """The server's address as options of the Spark source and sink."""
        return {"url": self.streams, "token": self.token, "caFile": self.ca_file}

    def connection(self, bucket: str = "", retry_timeout_s: float = 120.0) -> ConnectionOptions:
        """The server's address for requests outside a query."""
        root = self.streams.rstrip("/")
        return ConnectionOptions(root, bucket, self.token, ca_file=self.ca_file, retry_timeout_s=retry_timeout_s)

    def checkpoint(self, name: str) -> str:
        """The checkpoint of the job of this name."""
        return f"{self.checkpoints.rstrip('/')}/{name}"


class Job(Protocol):
    """A configured job."""

    @property
    def name(self) -> str:
        """Unique within an application; names the query, its checkpoint and its metrics."""

    @property
    def source(self) -> str:
        """A description of what it reads, for people."""

    @property
    def target(self) -> str:
        """A description of what it writes, for people."""

    def start(self, spark: SparkSession, environment: JobEnvironment) -> StreamingQuery:
        """Start the query, or continue it from its checkpoint."""
