"""Received batches that are not what they claim to be."""

from __future__ import annotations

import pytest

from headwater.client import Batch, MalformedResponseError
from headwater.client.results import split_json


@pytest.mark.parametrize("bodies", [[b'{"a":1}'], [b"[1,2"], [b"[1]", b"2"], [b""]])
def test_json_batch_that_is_not_an_array_is_malformed(bodies: list[bytes]) -> None:
    batch = Batch(bodies, "application/json", "1", up_to_date=True, closed=False)
    with pytest.raises(MalformedResponseError, match="a batch is not a JSON array"):
        _ = batch.values
    with pytest.raises(MalformedResponseError, match="a batch is not a JSON array"):
        split_json(bodies[-1])


def test_json_batch_is_decoded_and_split() -> None:
    batch = Batch([b'[1,{"a":2}]', b"[]", b'["x"]'], "application/json", "1", up_to_date=True, closed=False)
    assert batch.values == [1, {"a": 2}, "x"]
    assert split_json(b'[1, {"a": 2}]') == [b"1", b'{"a": 2}']
