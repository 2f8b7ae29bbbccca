"""`DS_LIMITS__MAX_MEMORY_BYTES` and `DS_LIMITS__MAX_METADATA_BYTES`: what they limit in each storage mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.config import load_settings
from headwater.http.server import _limits
from tests.http.protocol import Stream, assert_problem
from tests.serving import serve

LIMIT = 100_000


def settings(**environ: str) -> Any:
    return load_settings(None, None, environ, Path("/nonexistent")).settings


@pytest.mark.parametrize(
    ("mode", "variable"),
    [
        ("memory", "DS_LIMITS__MAX_MEMORY_BYTES"),
        ("file-fast", "DS_LIMITS__MAX_METADATA_BYTES"),
        ("acid", "DS_LIMITS__MAX_METADATA_BYTES"),
    ],
)
def test_empty_streams_are_refused_beyond_the_limit(mode: str, variable: str) -> None:
    environment: dict[str, Any] = {variable: str(LIMIT), "DS_STORAGE__MODE": mode, "DS_STORAGE__ACID_SHARD_COUNT": "1"}
    with serve(**environment) as server, httpx.Client(base_url=server.url) as http:
        answers = [Stream(http, f"s{number}").put() for number in range(100)]
        created = sum(answer.status_code == 201 for answer in answers)
        assert 40 < created < 70
        assert_problem(answers[-1], 413, "memory_full")
        assert variable.removeprefix("DS_LIMITS__").lower() in answers[-1].json()["detail"]
        assert Stream(http, "s0").delete().status_code == 204
        Stream(http, "another").create()


def test_memory_limit_caps_the_cache_of_the_file_modes() -> None:
    assert settings(DS_LIMITS__MAX_MEMORY_BYTES="1000000").hot_tail_bytes == 1_000_000
    assert settings(DS_STORAGE__HOT_TAIL_BYTES="1000").hot_tail_bytes == 1000


def test_each_storage_mode_has_its_own_limits() -> None:
    environment = {"DS_LIMITS__MAX_MEMORY_BYTES": "1000", "DS_LIMITS__MAX_METADATA_BYTES": "2000"}
    memory = _limits(settings(**environment))
    assert (memory.max_total_bytes, memory.max_metadata_bytes) == (1000, 0)
    durable = _limits(settings(DS_STORAGE__MODE="file-durable", **environment))
    assert (durable.max_total_bytes, durable.max_metadata_bytes) == (0, 2000)
