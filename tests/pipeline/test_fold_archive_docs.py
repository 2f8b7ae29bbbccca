"""The pages on folds and archives list exactly the settings, with their descriptions."""

from __future__ import annotations

import tomllib

import pytest
from pydantic import BaseModel

from headwater.pipeline.archive.job import Archive
from headwater.pipeline.fold.job import Fold
from tests.spark.session import REPOSITORY


@pytest.mark.parametrize(("page", "model", "kind"), [("folds.md", Fold, "fold"), ("archives.md", Archive, "archive")])
def test_table_of_settings_matches_the_model(page: str, model: type[BaseModel], kind: str) -> None:
    text = (REPOSITORY / "docs" / page).read_text()
    rows = text[text.index("| setting | default | what |") :].splitlines()[2:]
    listed = {row.split("`")[1]: row.rsplit(" | ", 1)[1].removesuffix(" |") for row in rows}
    assert listed == {name: field.description for name, field in model.model_fields.items() if field.description}
    example = text[text.index("```toml") + 7 :]
    (section,) = tomllib.loads(example[: example.index("```")])[kind]
    model(**section)
