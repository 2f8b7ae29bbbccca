"""Expiry headers: what is accepted, and what a conflict says."""

from __future__ import annotations

import pytest

from tests.http.protocol import Stream, assert_problem


@pytest.mark.parametrize("fraction", ["1234567890", "500000000000", "9" * 40], ids=len)
def test_a_fraction_of_a_second_may_have_any_number_of_digits(stream: Stream, fraction: str) -> None:
    """protocol line 84: an RFC 3339 timestamp, whose grammar has 1*DIGIT after the dot."""
    stream.create(headers={"Stream-Expires-At": f"2099-01-01T00:00:00.{fraction}Z"})
    assert stream.head().headers["stream-expires-at"] == f"2099-01-01T00:00:00.{fraction[:3]}Z"


def test_a_conflict_of_ttls_names_the_one_that_the_stream_has(stream: Stream) -> None:
    """reference line 525: 409 for another configuration. It said "another Stream-TTL (None)"."""
    stream.create()
    refused = stream.put(headers={"Stream-TTL": "60"})
    assert_problem(refused, 409, "config_mismatch")
    assert refused.json()["detail"] == "The stream exists without a Stream-TTL."


def test_a_conflict_of_expiry_times_names_the_one_that_the_stream_has(stream: Stream) -> None:
    """reference line 525."""
    stream.create(headers={"Stream-Expires-At": "2099-01-01T00:00:00Z"})
    refused = stream.put()
    assert_problem(refused, 409, "config_mismatch")
    assert refused.json()["detail"] == "The stream exists with Stream-Expires-At 2099-01-01T00:00:00Z."
