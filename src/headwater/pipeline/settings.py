"""What a pipeline does: its jobs and surroundings, from a TOML file, the environment, and flags; the later wins.

Without a file it does what the reference sync service does: the table `items` goes to the stream `pg-items`, the stream
`session-events` to the table `session_events`. Invariant: settings in hand are complete and valid; a name that is no
setting is an error, never ignored.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from headwater.pipeline.changes import FollowedTable
from headwater.pipeline.from_postgres import FromPostgres
from headwater.pipeline.job import Job, Surroundings
from headwater.pipeline.to_postgres import MIB, ToPostgres
from headwater.postgres.tables import OFFSET, SESSION_EVENTS, STREAM

log = logging.getLogger("headwater.pipeline")

DEFAULT_FILE: Final = Path("config/pipeline.toml")
STREAM_PATH: Final = "/v1/stream"
_ENVIRONMENT: Final = {
    "DS_SERVER_URL": "server",
    "POSTGRES_URL": "postgres",
    "ELECTRIC_URL": "electric",
    "DS_CA_FILE": "ca_file",
}
_PREFIX: Final = "DS_PIPELINE__"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class PipelineError(Exception):
    """Settings that cannot be used. `str()` is the one line to show."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class General(_Section):
    """Where the server and the database are, and how the application runs."""

    server: str = Field("http://localhost:4437", description="The server's address, with or without `/v1/stream`.")
    postgres: str = Field(
        "postgresql://postgres:password@localhost:54321/durable_streams", description="The database's address."
    )
    electric: str = Field("", description="Accepted and not used: changes are read from Postgres itself.")
    token: str = Field("", description="Sent to the server as bearer token.", repr=False)
    ca_file: str = Field("", description="PEM certificates to trust the server by, on every node; else the system's.")
    master: str = Field("local[2]", description="Where Spark runs: local[N], or the address of a cluster.")
    spark: dict[str, str] = Field({}, description="Further settings of the Spark session, by their names.")
    checkpoints: str = Field("data/pipeline", description="Where queries keep their places.")
    metrics_host: str = Field("127.0.0.1", description="Where metrics and readiness are answered.")
    metrics_port: int = Field(9437, ge=0, le=65535, description="Their port; 0 picks a free one.")
    probe: bool = Field(
        False,
        description="Be ready only when an event of our own has gone through a stream and a table of our own. The stack"
        " sets it.",
    )
    status_stream: str = Field("__pipeline__", description="The stream that takes the status; empty tells none.")
    status_interval: float = Field(10.0, gt=0, description="Seconds after which a status is told although it is old.")
    restart_wait: float = Field(1.0, gt=0, description="Seconds before a failed query is started again; doubles.")
    restart_wait_max: float = Field(60.0, gt=0, description="Most seconds between two starts.")

    @field_validator("server")
    @classmethod
    def _stream_root(cls, server: str) -> str:
        root = server.rstrip("/")
        if not root.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return root if root.endswith(STREAM_PATH) else root + STREAM_PATH

    @field_validator("checkpoints")
    @classmethod
    def _absolute(cls, checkpoints: str) -> str:
        return checkpoints if "://" in checkpoints else str(Path(checkpoints).absolute())


class ToPostgresSection(_Section):
    """Streams into a table."""

    name: Name = "session-events"
    streams: tuple[str, ...] = Field((), description="The streams; created when missing.")
    prefix: str = Field("", description="Instead: every stream whose name begins so, also those that come later.")
    table: str = Field("session_events", description="The table, `schema.table` or in `public`; created when missing.")
    columns: dict[str, str] = Field(
        dict(SESSION_EVENTS),
        description="Column = what fills it: `@stream`, `@offset`, `@incarnation` (`ds_incarnation` if left out),"
        " `@position`, `@payload`, or a field's path.",
    )
    types: dict[str, str] = Field({}, description="Types of columns, where the table is to be created; else text.")
    batch_bytes_max: int = Field(32 * MIB, ge=1024, description="Most bytes in one batch.")
    event_bytes_max: int = Field(16 * MIB, ge=1, description="Larger events go to the dead letters.")
    on_gone: Literal["fail", "restart", "bootstrap", "skip"] = Field(
        "restart",
        description="As the source's option onGone: a stream that was deleted is waited for, and read from its"
        " beginning when it was created again.",
    )
    wait_max: float = Field(600.0, gt=0, description="Seconds that a batch waits for the database.")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if bool(self.streams) == bool(self.prefix):
            raise ValueError("give either streams or prefix")
        sources = list(self.columns.values())
        if STREAM not in sources or OFFSET not in sources:
            raise ValueError('columns must have one for "@stream" and one for "@offset": they are the key')
        return self

    def job(self) -> ToPostgres:
        return ToPostgres(
            self.name,
            self.table,
            self.streams,
            self.prefix,
            self.columns,
            self.types,
            self.batch_bytes_max,
            self.event_bytes_max,
            self.on_gone,
            self.wait_max,
        )


class TableSection(_Section):
    """One followed table."""

    table: str
    stream: str = Field(description="The stream; with `{key}` in it, one for each key.")
    format: Literal["rows", "changes", "envelopes"] = "rows"
    key: tuple[str, ...] = Field((), description="The key's columns; else those of the primary key.")
    operations: tuple[Literal["insert", "update", "delete", "truncate"], ...] = Field(
        (), description="What is told; by default everything, but of `rows` inserts alone."
    )
    snapshot: bool = Field(True, description="Tell first what is there already.")
    full_rows: bool = Field(False, description="Set REPLICA IDENTITY FULL: old rows whole, no value missing.")

    def followed(self) -> FollowedTable:
        everything = ("insert",) if self.format == "rows" else ("insert", "update", "delete", "truncate")
        return FollowedTable(
            self.table,
            self.stream,
            self.format,
            self.key,
            self.operations or everything,
            self.snapshot,
            self.full_rows,
        )


class FromPostgresSection(_Section):
    """Tables into streams, by one slot."""

    name: Name = "pg-items"
    slot: str = Field("headwater", pattern=r"^[a-z0-9_]{1,63}$", description="The replication slot.")
    publication: str = Field("headwater", description="The publication; tables are added to it.")
    tables: tuple[TableSection, ...] = Field(min_length=1)
    changes_per_batch_max: int = Field(100_000, ge=1, description="Most changes in a batch; transactions stay whole.")
    idle_wait: float = Field(0.5, gt=0, description="Seconds that one question for changes may wait for some.")
    wait_max: float = Field(600.0, gt=0, description="Seconds that a batch waits for the database.")
    lag_bytes_warn: int = Field(256 * MIB, ge=0, description="Log kept for the slot above which there is a warning.")
    lag_bytes_max: int = Field(0, ge=0, description="Above it the job stops and the slot is dropped; 0 is never.")
    create_items: bool = Field(False, description="Create the reference's table `items` when it is missing.")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        told = [one.stream for one in self.tables if one.format == "changes" and "{key}" not in one.stream]
        if len(set(told)) < len(told):
            raise ValueError("tables in the format changes need a stream each: a TRUNCATE of one resets all of it")
        if len({one.table for one in self.tables}) < len(self.tables):
            raise ValueError("a table can be followed once in a job")
        return self

    def job(self) -> FromPostgres:
        return FromPostgres(
            self.name,
            tuple(one.followed() for one in self.tables),
            self.slot,
            self.publication,
            self.changes_per_batch_max,
            self.idle_wait,
            self.wait_max,
            self.lag_bytes_warn,
            self.lag_bytes_max,
            self.create_items,
        )


class PipelineSettings(_Section):
    pipeline: General = General()
    to_postgres: tuple[ToPostgresSection, ...] = ()
    from_postgres: tuple[FromPostgresSection, ...] = ()
    fold: tuple[dict[str, Any], ...] = ()
    archive: tuple[dict[str, Any], ...] = ()

    @property
    def surroundings(self) -> Surroundings:
        general = self.pipeline
        return Surroundings(general.server, general.checkpoints, general.token, general.postgres, general.ca_file)

    def jobs(self) -> list[Job]:
        """Everything that is configured; folds and archives are imported only where there are some."""
        jobs: list[Job] = [section.job() for section in self.from_postgres]
        jobs += [section.job() for section in self.to_postgres]
        if self.fold:
            from headwater.pipeline.fold.job import Fold  # noqa: PLC0415

            jobs += [_made("fold", Fold, section) for section in self.fold]
        if self.archive:
            from headwater.pipeline.archive.job import Archive  # noqa: PLC0415

            jobs += [_made("archive", Archive, section) for section in self.archive]
        names = [job.name for job in jobs]
        for name in names:
            if names.count(name) > 1:
                raise PipelineError(f"two jobs are called {name}; a name keeps a job's place, so each needs its own")
        return jobs


def reference_jobs() -> dict[str, Any]:
    """What runs when no job is configured."""
    return {
        "to_postgres": [{"name": "session-events", "streams": ["session-events"]}],
        "from_postgres": [
            {
                "name": "pg-items",
                "create_items": True,
                "tables": [{"table": "items", "stream": "pg-items", "format": "rows"}],
            }
        ],
    }


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object] | None = None) -> PipelineSettings:
    """Read the file (the one named, or config/pipeline.toml if there is one), the environment, the flags."""
    given = _from_file(file)
    if not any(given.get(kind) for kind in ("to_postgres", "from_postgres", "fold", "archive")):
        given |= reference_jobs()
    general = dict(given.get("pipeline", {}))
    for variable, key in _ENVIRONMENT.items():
        if environ.get(variable):
            general[key] = environ[variable]
    for variable in sorted(environ):
        if variable.startswith(_PREFIX):
            general[variable.removeprefix(_PREFIX).lower()] = environ[variable]
    general |= {key: value for key, value in (flags or {}).items() if value is not None}
    try:
        settings = PipelineSettings(**{**given, "pipeline": general})
    except ValidationError as error:
        raise PipelineError(_one_line(error)) from None
    if settings.pipeline.electric:
        log.warning(
            "ELECTRIC_URL=%s is not used: changes are read from Postgres itself, by a replication slot of our own",
            settings.pipeline.electric,
        )
    return settings


def _from_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        if not DEFAULT_FILE.exists():
            return {}
        file = DEFAULT_FILE
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PipelineError(f"--config {file}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PipelineError(f"{file}: not valid TOML: {error}") from None


def _made(kind: str, model: type[BaseModel], section: dict[str, Any]) -> Job:
    try:
        return cast(Job, model(**section))
    except ValidationError as error:
        raise PipelineError(f"{kind}: {_one_line(error)}") from None


def _one_line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    message = "no such setting" if first["type"] == "extra_forbidden" else first["msg"]
    return f"{place}: {message}" if place else message
