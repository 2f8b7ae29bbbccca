"""The options of `format("headwater")` in docs/spark.md."""

from __future__ import annotations

from scripts.generated_docs.markdown import table

from headwater.spark.option_table import OPTIONS


def option_tables() -> str:
    return "\n\n".join(
        f"### {title}\n\n{_table(side)}"
        for side, title in (("both", "Source and sink"), ("source", "Source"), ("sink", "Sink"))
    )


def _table(side: str) -> str:
    rows = (
        (f"`{option.name}`", f"`{option.default}`" if option.default else "none", option.takes, option.purpose)
        for option in OPTIONS
        if option.side == side
    )
    return table("| option | default | takes | purpose |", rows)
