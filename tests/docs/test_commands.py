"""The code blocks of the documentation run as printed and produce the printed output."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.docs.markdown import REPOSITORY, blocks, examples, page_id, pages
from tests.docs.running import PageRun
from tests.serving import serve

RUN_HERE = ("bash", "python", "ts", "js")
SHOWN = frozenset(("text", "json", "toml", "yaml", "http", "html", "nginx", "css", "diff"))
"""Languages that are only shown. A block of any other is run here, or names the test that runs it or a reason."""

_PAGES_WITH_EXAMPLES = [page for page in pages() if examples(page, *RUN_HERE)]


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_every_block_is_run_or_has_a_reason_not_to(page: Path) -> None:
    for block in blocks(page):
        where = f"{page_id(page)}, line {block.line}"
        assert block.language, f"{where}: the block has no language (```bash, ```text, …)"
        if block.run_by:
            assert block.run_by.startswith("tests/"), f"{where}: {block.run_by}"
            assert (REPOSITORY / block.run_by).is_file(), f"{where} names {block.run_by}, which does not exist"
        elif not block.not_run:
            assert block.language in SHOWN or block.language in RUN_HERE, (
                f"{where}: {block.language} is not run; name the test that runs it (<!-- run by: tests/… -->)"
                " or the reason (<!-- not run: … -->)"
            )


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_json_and_toml_blocks_are_valid(page: Path) -> None:
    for block in blocks(page):
        if block.language == "json" and not block.marked:
            json.loads(block.text)
        elif block.language == "toml" and not block.marked:
            tomllib.loads(block.text)


@pytest.mark.timeout(900)  # a page may start forty processes, which takes long on a busy machine
@pytest.mark.parametrize("page", _PAGES_WITH_EXAMPLES, ids=page_id)
def test_blocks_of_a_page_work_as_printed(page: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    # The same start as `make run`, except for the port and the data directory.
    with serve(arguments=("--profile", "dev"), directory=REPOSITORY, DS_STORAGE__DATA_DIR=str(data)) as server:
        run = PageRun(server, tmp_path)
        compiled = run.compile_scripts(examples(page, "ts", "js"))
        for example in examples(page, *RUN_HERE):
            if example.block.language == "bash":
                printed = run.bash(example)
            elif example.block.language == "python":
                printed = run.python(example)
            else:
                printed = run.javascript(example, compiled)
            where = f"{page_id(page)}, line {example.line}: {example.block.content[0]}"
            said = "\n".join(printed.stdout)
            assert printed.missing is None, f"{where}\npromised: {printed.missing}\nprinted:\n{said}\n{printed.stderr}"


def test_readme_shows_every_operation() -> None:
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
