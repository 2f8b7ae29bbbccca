"""The settings in docs/configuration.md."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from scripts.generated_docs.markdown import table

from headwater.config.describe import Described, described_settings
from headwater.config.sections import Settings


def setting_tables() -> str:
    """One heading and table for each section, in the order of the settings."""
    sections = groupby(described_settings(), key=lambda setting: setting.section)
    return "\n\n".join(_section(name, settings) for name, settings in sections)


def _section(name: str, settings: Iterable[Described]) -> str:
    model = Settings.model_fields[name].annotation
    assert model is not None
    purpose = (model.__doc__ or "").strip()
    rows = ((f"`{each.variable}`", default(each), each.takes, each.description) for each in settings)
    return f"### `[{name}]`\n\n{purpose}\n\n{table('| variable | default | takes | what it does |', rows)}"


def default(setting: Described) -> str:
    return f"`{setting.default}`" if setting.default else "unset"
