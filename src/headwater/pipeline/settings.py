"""The settings of the pipeline, from a TOML file, environment variables and flags; the later wins.

Without a file, the jobs are those of the reference sync service: the table `items` goes to the stream `pg-items`, the
stream `session-events` to the table `session_events`. Invariant: loaded settings are complete and valid; an unknown
setting is an error.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, Self
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from headwater.config import ConfigError
from headwater.config.errors import shown
from headwater.pipeline.archive.job import Archive
from headwater.pipeline.fold.job import Fold
from headwater.pipeline.from_postgres import FromPostgres
from headwater.pipeline.job import Job, JobEnvironment
from headwater.pipeline.to_postgres import ToPostgres

log = logging.getLogger("headwater.pipeline")

DEFAULT_FILE: Final = Path("config/pipeline.toml")
STREAM_PATH: Final = "/v1/stream"
_ENVIRONMENT: Final = {
    "DS_SERVER_URL": "server",
    "POSTGRES_URL": "postgres",
    "ELECTRIC_URL": "electric",
    "ELECTRIC_SECRET": "electric_secret",
    "ELECTRIC_SECRET_FILE": "electric_secret_file",
    "DS_CA_FILE": "ca_file",
    "DS_OTEL__ENDPOINT": "otel_endpoint",
    "DS_OTEL__SAMPLE_RATIO": "otel_sample_ratio",
    "DS_OTEL__METRICS_INTERVAL_SECS": "otel_metrics_interval",
}
_PREFIX: Final = "DS_PIPELINE__"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PipelineSection(_Section):
    """The addresses of the server and the database, and how the application runs."""

    server: str = Field("http://localhost:4437", description="The server's address, with or without `/v1/stream`.")
    postgres: str = Field(
        "postgresql://postgres:password@localhost:54321/durable_streams", description="The database's address."
    )
    cdc: Literal["slot", "electric"] = Field(
        "slot", description="Where changes of tables are read from, unless the table says otherwise."
    )
    electric: str = Field(
        "", description='Address of Electric, or of `headwater shapes`, for tables with `cdc = "electric"`.'
    )
    electric_secret: str = Field("", description="Sent to it as `secret`.", repr=False)
    electric_secret_file: str = Field("", description="A file with the secret, instead.")
    token: str = Field("", description="Sent to the server as bearer token.", repr=False)
    ca_file: str = Field(
        "", description="PEM file of CA certificates, on every node; if empty, the system's certificates."
    )
    master: str = Field("local[2]", description="Where Spark runs: local[N], or the address of a cluster.")
    spark: dict[str, str] = Field({}, description="Further settings of the Spark session, by name.")
    checkpoints: str = Field("data/pipeline", description="The directory of the checkpoints.")
    metrics_host: str = Field("127.0.0.1", description="The address of metrics and readiness.")
    metrics_port: int = Field(9437, ge=0, le=65535, description="Their port; 0 picks a free one.")
    probe: bool = Field(
        True,
        description="Report ready only after a test event has passed through a stream to a table. Needs permission to"
        " create a stream and a table.",
    )
    status_stream: str = Field("__pipeline__", description="The stream of status events; if empty, none are sent.")
    status_interval: float = Field(10.0, gt=0, description="Seconds after which an unchanged status is sent again.")
    otel_endpoint: str = Field(
        "",
        description="Base URL of an OTLP/HTTP receiver for spans and metrics; empty for none. Needs `headwater[otel]`.",
    )
    otel_sample_ratio: float = Field(1.0, ge=0, le=1, description="Fraction of the traces started here to record.")
    otel_metrics_interval: float = Field(60.0, gt=0, description="Seconds between two exports of metrics.")
    restart_wait: float = Field(1.0, gt=0, description="Seconds before a failed query restarts; doubles.")
    restart_wait_max: float = Field(60.0, gt=0, description="Most seconds before a restart.")

    @field_validator("server")
    @classmethod
    def _stream_root(cls, server: str) -> str:
        root = server.rstrip("/")
        if not root.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return root if root.endswith(STREAM_PATH) else root + STREAM_PATH

    @field_validator("otel_endpoint")
    @classmethod
    def _otel_is_installed(cls, endpoint: str) -> str:
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        if endpoint and find_spec("opentelemetry.sdk") is None:
            raise ValueError("OpenTelemetry is not installed: pip install 'headwater[otel]'")
        return endpoint.rstrip("/")

    @field_validator("checkpoints")
    @classmethod
    def _absolute(cls, checkpoints: str) -> str:
        return checkpoints if "://" in checkpoints else str(Path(checkpoints).absolute())


class PipelineSettings(_Section):
    pipeline: PipelineSection = PipelineSection()
    to_postgres: tuple[ToPostgres, ...] = ()
    from_postgres: tuple[FromPostgres, ...] = ()
    fold: tuple[Fold, ...] = ()
    archive: tuple[Archive, ...] = ()

    @property
    def environment(self) -> JobEnvironment:
        general = self.pipeline
        known = general.electric_secret
        if not known and general.electric_secret_file:
            known = Path(general.electric_secret_file).read_text(encoding="utf-8").strip()
        secret = f"?{urlencode({'secret': known})}" if known else ""
        return JobEnvironment(
            general.server,
            general.checkpoints,
            general.token,
            general.postgres,
            general.ca_file,
            general.electric + secret,
            general.otel_endpoint,
            general.otel_sample_ratio,
        )

    @model_validator(mode="after")
    def _electric_has_an_address(self) -> Self:
        for job in self.from_postgres:
            for table in job.electric_tables:
                if not table.electric_url and not self.pipeline.electric:
                    raise ValueError(f"{table.table} is read from Electric: set ELECTRIC_URL or its electric_url")
        return self

    def jobs(self) -> list[Job]:
        """Every configured job. Two jobs with one name would share a checkpoint, so that is an error."""
        jobs: list[Job] = [*self.from_postgres, *self.to_postgres, *self.fold, *self.archive]
        names = [job.name for job in jobs]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"two jobs are called {name}; a job's checkpoint has its name, so names must be unique"
                )
        return jobs


def reference_jobs() -> dict[str, Any]:
    """The jobs of the reference sync service, for settings without a job."""
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
    """Read the file (this one, or config/pipeline.toml if it exists), the environment and the flags."""
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
    for job in given.get("from_postgres", ()):
        for table in job.get("tables", ()):
            table.setdefault("cdc", general.get("cdc", "slot"))
    try:
        settings = PipelineSettings(**{**given, "pipeline": general})
    except ValidationError as error:
        raise ConfigError(validation_message(error)) from None
    if settings.pipeline.electric and not any(job.electric_tables for job in settings.from_postgres):
        log.warning('ELECTRIC_URL=%s is not used: no table has cdc = "electric"', settings.pipeline.electric)
    return settings


def _from_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        if not DEFAULT_FILE.exists():
            return {}
        file = DEFAULT_FILE
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config {file}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None


def validation_message(error: ValidationError) -> str:
    """The first mistake as one line: the setting, its value, and what is wrong with it."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
        return f"{place}: no such setting"
    if first["type"] in {"missing", "missing_argument"}:
        return f"{place}: this setting is required"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":  # Our own rules name the value where it helps.
        return f"{place}: {message}" if place else message
    return f"{place}: got {shown(first['input'])}; {message.replace('Input', 'it', 1).replace('tuple', 'list')}"
