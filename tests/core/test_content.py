"""Content types: what is compared, what is JSON, what is text, and how a body becomes messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.content import (
    NO_MESSAGES,
    check_content_type,
    is_json,
    is_text,
    media_type,
    split_body,
)
from headwater.core.errors import EmptyBody, InvalidContentType, InvalidJson

pytestmark = pytest.mark.usefixtures("build")


@pytest.mark.parametrize(
    "spelling",
    [
        "text/plain",
        "TEXT/Plain",
        "text/plain;charset=utf-8",
        "text/plain; charset=UTF-8",
        "text/plain ;x=y",
        " text/plain ",
        "text/plain;",
    ],
)
def test_case_parameters_and_space_do_not_make_another_type(spelling: str) -> None:
    assert media_type(spelling) == "text/plain"


@pytest.mark.parametrize(
    "spelling", ["text/plain", "application/vnd.api+json", "application/x-protobuf", "a/b; c=d", "application/json;v=1"]
)
def test_a_type_is_kept_as_the_client_wrote_it(spelling: str) -> None:
    assert check_content_type(f" {spelling} ") == spelling


@pytest.mark.parametrize(
    "spelling",
    ["", " ", "text", "text/", "/plain", "/", "text plain", "text/pl ain", "text//plain", ";", "a/b/c", "é/b"],
)
def test_malformed_media_type_is_refused(spelling: str) -> None:
    with pytest.raises(InvalidContentType):
        check_content_type(spelling)


@pytest.mark.parametrize("content_type", ["application/json", "APPLICATION/JSON", "application/json; charset=utf-8"])
def test_json_mode_is_for_application_json(content_type: str) -> None:
    assert is_json(content_type)
    assert is_text(content_type)


@pytest.mark.parametrize(
    "content_type", ["application/ndjson", "application/vnd.api+json", "text/json", "application/jsonx", "text/plain"]
)
def test_other_content_types_are_not_json(content_type: str) -> None:
    assert not is_json(content_type)


@pytest.mark.parametrize(
    ("content_type", "text"),
    [
        ("text/plain", True),
        ("TEXT/html; charset=utf-8", True),
        ("application/octet-stream", False),
        ("application/ndjson", False),
        ("image/svg+xml", False),
        ("textual/plain", False),
        ("application/text/", False),
    ],
)
def test_events_carry_text_types_and_json_as_text(content_type: str, text: bool) -> None:
    assert is_text(content_type) is text


@given(st.binary(min_size=1), st.sampled_from(["text/plain", "application/octet-stream", "application/ndjson"]))
def test_body_of_any_other_type_is_one_unchanged_message(body: bytes, content_type: str) -> None:
    assert split_body(content_type, body) == (body, (len(body),))


@pytest.mark.parametrize("content_type", ["text/plain", "application/json"])
def test_an_empty_body_adds_nothing(content_type: str) -> None:
    assert split_body(content_type, b"", creating=True) == NO_MESSAGES
    assert split_body(content_type, b"") == NO_MESSAGES


def test_an_empty_array_creates_an_empty_stream_but_appends_nothing() -> None:
    for body in (b"[]", b" [ \r\n\t] "):
        assert split_body("application/json", body, creating=True) == NO_MESSAGES
        with pytest.raises(EmptyBody):
            split_body("application/json", body)


def test_an_empty_array_is_data_where_there_is_no_json_mode() -> None:
    assert split_body("text/plain", b"[]") == (b"[]", (2,))


def test_the_body_of_a_create_is_checked_like_that_of_an_append() -> None:
    with pytest.raises(InvalidJson):
        split_body("application/json", b"[1,", creating=True)
