"""The code blocks of the documentation run as printed and produce the printed output."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.docs.markdown import REPOSITORY, blocks, examples, page_id, pages
from tests.docs.running import Kitchen
from tests.serving import serve

RUN_HERE = ("bash", "python", "ts", "js")
SHOWN = frozenset(("text", "json", "toml", "yaml", "http", "html", "nginx", "css", "diff"))
"""Languages of what is only shown. A block of any other is run here, or says who runs it or why nobody does."""

_PAGES_WITH_EXAMPLES = [page for page in pages() if examples(page, *RUN_HERE)]


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_every_block_is_run_or_has_a_reason_not_to(page: Path) -> None:
    for block in blocks(page):
        where = f"{page_id(page)}, line {block.line}"
        assert block.language, f"{where}: say what the block is (```bash, ```text, …)"
        if block.run_by:
            assert block.run_by.startswith("tests/"), f"{where}: {block.run_by}"
            assert (REPOSITORY / block.run_by).is_file(), f"{where} is said to be run by {block.run_by}"
        elif not block.not_run:
            assert block.language in SHOWN or block.language in RUN_HERE, (
                f"{where}: nobody runs {block.language}; say who does (<!-- run by: tests/… -->)"
                " or why nobody (<!-- not run: … -->)"
            )


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_json_and_toml_can_be_read(page: Path) -> None:
    for block in blocks(page):
        if block.language == "json" and not block.marked:
            json.loads(block.text)
        elif block.language == "toml" and not block.marked:
            tomllib.loads(block.text)


@pytest.mark.timeout(300)  # a page may start forty processes; seconds on a quiet machine, not on a busy one
@pytest.mark.parametrize("page", _PAGES_WITH_EXAMPLES, ids=page_id)
def test_what_a_page_prints_works_as_printed(page: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    # The same start as `make run`, but for the port and the place of its data.
    with serve(arguments=("--profile", "dev"), directory=REPOSITORY, DS_STORAGE__DATA_DIR=str(data)) as server:
        kitchen = Kitchen(server, tmp_path)
        compiled = kitchen.compile_scripts(examples(page, "ts", "js"))
        for example in examples(page, *RUN_HERE):
            if example.block.language == "bash":
                printed = kitchen.bash(example)
            elif example.block.language == "python":
                printed = kitchen.python(example)
            else:
                printed = kitchen.javascript(example, compiled)
            where = f"{page_id(page)}, line {example.line}: {example.block.content[0]}"
            said = "\n".join(printed.stdout)
            assert printed.missing is None, f"{where}\npromised: {printed.missing}\nprinted:\n{said}\n{printed.stderr}"


def test_the_readme_shows_the_whole_round() -> None:
    readme = examples(REPOSITORY / "README.md", "bash")
    shown = "\n".join(command for example in readme for command in example.commands)
    for part in (
        "-X PUT",
        "-X POST",
        "offset=-1",
        "live=sse",
        "Stream-Closed: true",
        "-X DELETE",
        "application/json",
    ):
        assert part in shown
