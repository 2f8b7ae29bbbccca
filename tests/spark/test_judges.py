"""What the tests that kill judge by finds copies and folds that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.pipeline.buckets import Bucket
from tests.pipeline.test_fold_archive_kill import judge as judge_fold
from tests.serving import Server
from tests.spark.streams import Streams
from tests.spark.test_kill import judge


@pytest.mark.parametrize(
    ("copied", "says"),
    [([0, 1, 3], "lost"), ([0, 1, 1, 2, 3], "twice"), ([0, 2, 1, 3], "out of order"), ([], "lost")],
    ids=["lost", "twice", "out of order", "nothing"],
)
def test_a_wrong_copy_is_found(streams: Streams, stream_name: Callable[[], str], copied: list[int], says: str) -> None:
    source = stream_name()
    streams.filled(source, [{"n": number} for number in range(4)])
    streams.filled(f"copy-of-{source}", [{"n": number} for number in copied])
    with pytest.raises(AssertionError, match=says):
        judge(streams, {source: 4}, "wrong on purpose")


def change(key: str, value: int) -> dict[str, Any]:
    return {"type": "item", "key": key, "value": {"n": value}, "headers": {"operation": "upsert"}}


def test_a_wrong_fold_is_found(server: Server) -> None:
    with httpx.Client() as http:
        bucket = Bucket(server, http, "judged-folds")
        bucket.filled("s0", [change("a", 1), change("b", 2)])
        judge_fold(bucket, {"s0": [change("a", 1), change("b", 2)]}, "right")
        for sent in (
            [change("a", 1)],
            [change("a", 1), change("b", 3)],
            [change("a", 1), change("b", 2), change("c", 3)],
        ):
            with pytest.raises(AssertionError, match="on purpose"):
                judge_fold(bucket, {"s0": sent}, "wrong on purpose")
