"""Fail tests in which a callback of the engine raises; the engine itself logs the error and continues."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_callback_fails(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test in which a callback of the engine raised, unless its module says that this is expected."""
    yield
    if getattr(request.module, "CALLBACKS_MAY_FAIL", False):
        return
    failed = [record for record in caplog.get_records("call") if "a callback of the engine failed" in record.msg]
    assert not failed, failed[0].getMessage()
