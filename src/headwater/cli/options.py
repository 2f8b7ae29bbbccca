"""Options that several commands share, and loading the settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.config import ConfigError, LoadedSettings, Settings, load_settings


class StoreMode(StrEnum):
    """Storage modes that have a data directory, or are copied from and into one."""

    FILE_FAST = "file-fast"
    FILE_DURABLE = "file-durable"
    ACID = "acid"
    REDB = "redb"
    CLUSTER = "cluster"

    @property
    def canonical(self) -> str:
        return "acid" if self is StoreMode.REDB else self.value


Profile = Annotated[
    str | None,
    typer.Option(
        "--profile", metavar="NAME", help="Use the profile dev or prod, or read config/NAME.toml.", show_default=False
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings file, read last.", show_default=False),
]
DataDirectory = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="Data directory; overrides the setting.", show_default=False),
]
Mode = Annotated[
    StoreMode | None,
    typer.Option("--mode", help="Storage mode of the data; overrides the setting.", show_default=False),
]


def settings_from(
    profile: str | None, config_file: Path | None, flags: Mapping[str, object] | None = None
) -> LoadedSettings:
    """Load the settings, or raise a `CommandError` that says what is wrong."""
    try:
        return load_settings(profile, config_file, os.environ, Path.cwd(), flags)
    except ConfigError as error:
        raise CommandError(str(error), USAGE) from None


def require_otel(settings: Settings) -> None:
    """Check that OpenTelemetry is installed if it is enabled, before starting a process that needs it."""
    if settings.otel.endpoint and find_spec("opentelemetry.sdk") is None:
        raise CommandError(
            "otel.endpoint is set, but OpenTelemetry is not installed: pip install 'headwater[otel]'", USAGE
        )
