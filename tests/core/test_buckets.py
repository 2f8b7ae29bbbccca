"""Identifiers of buckets and their streams (extensions §1.1), and the names under which they are stored."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core import buckets
from headwater.core.errors import BadRequest, InvalidName
from headwater.core.names import check_name

allowed_ids = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=100
).filter(lambda text: ".." not in text and text not in (".", "streams") and len(text.encode()) <= 117)


@settings(deadline=None)
@given(allowed_ids)
def test_any_string_without_slash_nul_and_dots_is_a_stream_id(stream_id: str) -> None:
    assert buckets.check_stream_id("abcd", stream_id) == stream_id
    name = buckets.stream_name("abcd", stream_id)
    assert buckets.is_bucketed(name)
    assert buckets.ids_of(name) == ("abcd", stream_id)
    with pytest.raises(InvalidName):
        check_name(name, 1000)


@pytest.mark.parametrize("stream_id", ["", ".", "..", "a..b", "...", "a/b", "/", "a\0", "streams"])
def test_other_stream_ids_are_refused(stream_id: str) -> None:
    with pytest.raises(InvalidName):
        buckets.check_stream_id("abcd", stream_id)


@pytest.mark.parametrize(("bucket_id", "space"), [("abcd", 117), ("a" * 64, 57)])
def test_bucket_id_and_stream_id_are_limited_to_122_bytes_together(bucket_id: str, space: int) -> None:
    for character in ("x", "é", "日", "🙂"):
        size = len(character.encode())
        stream_id = character * (space // size) + "x" * (space % size)
        buckets.check_stream_id(bucket_id, stream_id)
        with pytest.raises(InvalidName):
            buckets.check_stream_id(bucket_id, stream_id + "x")


@settings(deadline=None)
@given(st.text(max_size=70))
def test_bucket_ids_match_the_documented_pattern(text: str) -> None:
    fits = 4 <= len(text) <= 64 and all(character in "abcdefghijklmnopqrstuvwxyz0123456789_-" for character in text)
    if fits:
        assert buckets.check_bucket_id(text) == text
    else:
        with pytest.raises(InvalidName):
            buckets.check_bucket_id(text)


@settings(deadline=None)
@given(st.text(st.sampled_from("abc019_-"), min_size=4, max_size=64))
def test_a_bucket_is_found_by_its_document(bucket_id: str) -> None:
    assert buckets.check_bucket_id(bucket_id) == bucket_id
    assert buckets.bucket_of_document(buckets.document_key(bucket_id)) == bucket_id
    assert buckets.bucket_of_document(f"link/{bucket_id}") is None


def test_page_limits() -> None:
    assert buckets.check_page_limit(None) == 1000
    assert [buckets.check_page_limit(text) for text in ("1", "999", "1000")] == [1, 999, 1000]
    for text in ("0", "1001", "", "-5", "1.0", "٣", "01", " 1"):
        with pytest.raises(BadRequest):
            buckets.check_page_limit(text)
