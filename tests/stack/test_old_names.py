"""Names of the reference system: each old make target prints the new name, and the page lists all of them."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.docs.markdown import REPOSITORY

OLD_TARGETS = (
    "dev",
    "dev-ui",
    "dev-down",
    "docker",
    "docs-serve",
    "integration-test",
    "integration-test-sessions",
    "pgo-train",
    "release-pgo",
    "pgo-benchmark",
)
PAGE = (REPOSITORY / "docs" / "from-the-reference.md").read_text(encoding="utf-8")
MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("target", OLD_TARGETS)
def test_old_make_target_fails_with_its_new_name(target: str) -> None:
    done = subprocess.run(
        ["make", "-s", target], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "use here: " in done.stderr
    assert f"`make {target}`" in PAGE


def test_targets_named_on_the_page_exist() -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):.*## ", MAKEFILE))
    for name in re.findall(r"`make ([a-z-]+)", PAGE.replace("`make docs`, then", "`make docs`")):
        assert name in targets or name in OLD_TARGETS, name
    for path in re.findall(r"pytest (tests/[\w/.]+)", PAGE + MAKEFILE):
        assert (REPOSITORY / path).exists(), path


def test_every_variable_on_the_page_is_a_setting() -> None:
    from headwater.config.describe import described_settings

    known = {setting.variable for setting in described_settings()}
    for variable in re.findall(r"`(DS_[A-Z]+__[A-Z_]+)", PAGE):
        assert variable in known, variable
