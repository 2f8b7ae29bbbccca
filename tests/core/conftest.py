"""Run tests with each build of the compiled functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headwater.core import native

BUILDS = ["pure"] if native.BUILD == "pure" else ["pure", "compiled"]


@pytest.fixture(scope="module", params=BUILDS)
def build(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs with the pure Python functions, and with the compiled ones if they are installed."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pure":
            patch.setattr(native, "split", native.pure_split)
            patch.setattr(native, "scan", native.pure_scan)
            patch.setattr(native, "extend_ends", native.pure_extend_ends)
            patch.setattr(native, "extend_shifted", native.pure_extend_shifted)
        yield request.param
