"""The checks of the trials detect wrong copies and folds."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.kills.feeding import Change
from tests.kills.judging import current_rows, judge_order, judge_state
from tests.pipeline.buckets import Bucket
from tests.serving import Server


@pytest.mark.parametrize(
    ("found", "says"),
    [([0, 1, 3], "lost"), ([0, 1, 1, 2, 3], "duplicated"), ([0, 2, 1, 3], "out of order"), ([], "lost")],
    ids=["lost", "twice", "out of order", "nothing"],
)
def test_wrong_copy_is_detected(found: list[int], says: str) -> None:
    judge_order([0, 1, 2, 3], [0, 1, 2, 3], "right")
    with pytest.raises(AssertionError, match=says):
        judge_order(found, [0, 1, 2, 3], "wrong on purpose")


def change(key: str, value: int) -> dict[str, Any]:
    return {"type": "item", "key": key, "value": {"n": value}, "headers": {"operation": "upsert"}}


def test_wrong_fold_is_detected(server: Server) -> None:
    with httpx.Client() as http:
        bucket = Bucket(server, http, "judged-folds")
        bucket.filled("s0", [change("a", 1), change("b", 2)])
        judge_state(f"{bucket.root}/s0", [change("a", 1), change("b", 2)], "right")
        for sent in (
            [change("a", 1)],
            [change("a", 1), change("b", 3)],
            [change("a", 1), change("b", 2), change("c", 3)],
        ):
            with pytest.raises(AssertionError, match="on purpose"):
                judge_state(f"{bucket.root}/s0", sent, "wrong on purpose")


def test_changes_of_a_table_are_its_copy_and_later_changes() -> None:
    changes: list[Change] = [("insert", "1", 1), ("insert", "2", 2), ("update", "1", 3), ("delete", "2", None)]
    assert current_rows(changes[:3]) == {"1": 3, "2": 2}
    assert current_rows(changes) == {"1": 3}
