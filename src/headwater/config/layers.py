"""Load the settings from defaults, files, the environment and flags; later sources override earlier ones.

Invariant: every value in a `LoadedSettings` has an origin. Every name in a file, and every `DS_…` variable of a known
section, must be a setting: a typo is an error with a suggestion.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from pydantic import AliasChoices, BaseModel, ValidationError

from headwater.config.describe import takes_of
from headwater.config.errors import ConfigError, unknown, wrong
from headwater.config.sections import VARIABLE_PREFIX, VARIABLE_SEPARATOR, Settings

CONFIG_DIRECTORY = "config"
INCLUDED_PROFILES = Path(__file__).parent / "profiles"
DEFAULT_ORIGIN = "default"

_PROFILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and for each `section.key` the origin of its value."""

    settings: Settings
    origins: dict[str, str]


@dataclass(frozen=True, slots=True)
class Given:
    """One value from one source, before validation."""

    section: str
    key: str
    value: object
    origin: str


def load_settings(
    profile: str | None,
    config_file: Path | None,
    environ: Mapping[str, str],
    cwd: Path,
    flags: Mapping[str, object] | None = None,
    flags_origin: str | None = None,
) -> LoadedSettings:
    """Read all sources. `flags` maps `section.key` to a command-line value. Raises `ConfigError` with one line.

    `flags_origin` is the origin that errors name for `flags` that are not from a command line.
    """
    values: dict[str, dict[str, object]] = {}
    origins = {f"{section}.{key}": DEFAULT_ORIGIN for section, key in _known_keys()}
    for given in _all_layers(profile, config_file, environ, cwd, flags or {}, flags_origin):
        values.setdefault(given.section, {})[given.key] = given.value
        origins[f"{given.section}.{given.key}"] = given.origin
    try:
        settings = Settings(**values)
    except ValidationError as error:
        _explain(error, values, origins)
    return LoadedSettings(settings, origins)


def _all_layers(
    profile: str | None,
    config_file: Path | None,
    environ: Mapping[str, str],
    cwd: Path,
    flags: Mapping[str, object],
    flags_origin: str | None,
) -> Iterator[Given]:
    directory = cwd / CONFIG_DIRECTORY
    yield from _file(directory / "default.toml", cwd)
    if profile is not None:
        yield from _profile(profile, directory, cwd)
    yield from _file(directory / "local.toml", cwd)
    if config_file is not None:
        if not (cwd / config_file).exists():
            raise ConfigError(f"--config {config_file}: no such file")
        yield from _file(cwd / config_file, cwd)
    yield from _environment(environ)
    for name, value in flags.items():
        section, _, key = name.partition(".")
        origin = flags_origin or f"--{key.replace('_', '-')}"
        if section not in Settings.model_fields:
            raise unknown("section", section, origin, Settings.model_fields)
        yield Given(section, _canonical_key(section, key, origin), value, origin)


def _profile(name: str, directory: Path, cwd: Path) -> Iterator[Given]:
    """Read a profile from the working directory, or one that the package includes."""
    own, included = directory / f"{name}.toml", INCLUDED_PROFILES / f"{name}.toml"
    if not _PROFILE_NAME.fullmatch(name) or not (own.is_file() or included.is_file()):
        found = {path.stem for path in (*directory.glob("*.toml"), *INCLUDED_PROFILES.glob("*.toml"))}
        available = ", ".join(sorted(found - {"default", "local"}))
        raise ConfigError(f"--profile {name}: there is no {CONFIG_DIRECTORY}/{name}.toml; available: {available}")
    if own.is_file():
        yield from _file(own, cwd)
    else:
        yield from _file(included, cwd, f"profile {name}")


def _file(path: Path, cwd: Path, origin: str = "") -> Iterator[Given]:
    if not path.exists():
        return
    origin = origin or (str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path))
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin}: not valid TOML: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{origin}: not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{origin}: cannot be read: {error.strerror}") from None
    for section, table in tables.items():
        if section not in Settings.model_fields:
            raise unknown("section", section, origin, Settings.model_fields)
        if not isinstance(table, dict):
            raise wrong(section, table, origin, f"a table: [{section}] and its keys below it")
        for key, value in table.items():
            yield Given(section, _canonical_key(section, key, origin), value, origin)


def _environment(environ: Mapping[str, str]) -> Iterator[Given]:
    for name in sorted(environ):
        section_name, separator, key_name = name.removeprefix(VARIABLE_PREFIX).partition(VARIABLE_SEPARATOR)
        if not name.startswith(VARIABLE_PREFIX) or not separator:
            continue
        section = section_name.lower()
        if section not in Settings.model_fields:
            # Other programs also use DS_…__… variables; only a name similar to one of our sections is an error.
            if get_close_matches(section, Settings.model_fields, n=1, cutoff=0.8):
                raise unknown("section", section, name, Settings.model_fields)
            continue
        yield Given(section, _canonical_key(section, key_name.lower(), name), environ[name], name)
    # The only variable without our prefix. As usual for this variable, an empty value means unset.
    if environ.get("RUST_LOG"):
        yield Given("log", "rust_log", environ["RUST_LOG"], "RUST_LOG")


def _canonical_key(section: str, key: str, origin: str) -> str:
    """Return the field name of a key or alias, or raise an error that suggests the closest one."""
    fields = _section_model(section).model_fields
    for name, field in fields.items():
        alias = field.validation_alias
        if key == name or (isinstance(alias, AliasChoices) and key in alias.choices):
            return name
    raise unknown("key", f"{section}.{key}", origin, (f"{section}.{name}" for name in fields))


def _explain(
    error: ValidationError, values: Mapping[str, Mapping[str, object]], origins: Mapping[str, str]
) -> NoReturn:
    """Raise a `ConfigError` with one line for pydantic's report."""
    first = error.errors(include_url=False)[0]
    section, *rest = (str(part) for part in first["loc"])
    given = values.get(section, {})
    cause = first.get("ctx", {}).get("error")
    if not rest:
        # A rule about several keys of a section: name the section and the origins of all its values.
        places = sorted({origins[f"{section}.{key}"] for key in given})
        raise ConfigError(f"{section}: {cause} (set by {', '.join(places)})") from None
    key = rest[0]
    field = _section_model(section).model_fields[key]
    raise wrong(
        f"{section}.{key}",
        given[key],
        origins[f"{section}.{key}"],
        takes_of(field),
        str(cause) if cause else None,
    ) from None


def _section_model(section: str) -> type[BaseModel]:
    model = Settings.model_fields[section].annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    return model


def _known_keys() -> Iterator[tuple[str, str]]:
    for section in Settings.model_fields:
        for key in _section_model(section).model_fields:
            yield section, key
