"""Writes the tables of docs/configuration.md from the settings' own definitions.

`python scripts/settings_table.py` writes, `--check` only compares (exit code 1 when they differ).
Invariant: everything between the markers comes from the code, everything else is left as it is.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from headwater.config.describe import Described, described_settings
from headwater.config.sections import Settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
BEGIN = "<!-- settings: made by scripts/settings_table.py, do not edit -->"
END = "<!-- /settings -->"


def tables() -> str:
    """One heading and table for each section, in the order of the settings."""
    parts = []
    for section, group in groupby(described_settings(), key=lambda setting: setting.section):
        model = Settings.model_fields[section].annotation
        assert model is not None
        purpose = (model.__doc__ or "").strip()
        rows = "\n".join(_row(setting) for setting in group)
        head = "| variable | default | takes | what it does |\n|---|---|---|---|"
        parts.append(f"### `[{section}]`\n\n{purpose}\n\n{head}\n{rows}")
    return "\n\n".join(parts)


def _row(setting: Described) -> str:
    default = f"`{setting.default}`" if setting.default else "unset"
    cells = (f"`{setting.variable}`", default, setting.takes, setting.description)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page_with_tables(page: str) -> str:
    """The page with everything between the markers made anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} has lost its markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def main() -> None:
    written = PAGE.read_text(encoding="utf-8")
    made = page_with_tables(written)
    if "--check" in sys.argv[1:]:
        if made != written:
            raise SystemExit(f"docs/{PAGE.name} does not match the settings; run `make fmt`")
        return
    if made != written:
        PAGE.write_text(made, encoding="utf-8")
        print(f"wrote docs/{PAGE.name}")


if __name__ == "__main__":
    main()
