"""Large JSON bodies split in steps: the same messages and the same refusals as in one call."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core import json_steps, native
from headwater.core.content import Messages, elements_of, split_json
from headwater.core.errors import EmptyBody, InvalidJson, MessageTooLarge, Refusal, TooManyMessages
from headwater.core.json_steps import needs_steps, split_json_in_steps
from tests.measured import least

pytestmark = pytest.mark.usefixtures("build")

MANY = 10_000_000
STEP_MAX_MS = 50.0


def run(steps: Generator[None, None, Messages]) -> tuple[Messages, int]:
    """Return the result of the steps and their number."""
    count = 1
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            return finished.value, count
        count += 1


def split(body: bytes, *, max_messages: int = MANY, max_message_bytes: int = MANY) -> Messages:
    return run(split_json_in_steps(body, max_messages=max_messages, max_message_bytes=max_message_bytes))[0]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_steps, "STEP_BYTES", 16)
    monkeypatch.setattr(json_steps, "SCAN_STEP_BYTES", 16)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def outcome_of(splitter: Callable[[bytes], Messages], body: bytes) -> Messages | type[Refusal]:
    try:
        return splitter(body)
    except Refusal as refusal:
        return type(refusal)


@given(st.lists(values, max_size=40), st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:")]), st.booleans())
def test_a_body_is_split_as_in_one_call(elements: list[object], separators: tuple[str, str], ascii_only: bool) -> None:
    body = json.dumps(elements, separators=separators, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_steps, "STEP_BYTES", 16)
        patch.setattr(json_steps, "SCAN_STEP_BYTES", 16)
        assert outcome_of(split, body) == outcome_of(split_json, body)


@given(st.text('[]{},:"\\ 1a\n', max_size=60))
def test_text_that_is_not_json_is_refused_as_in_one_call(inner: str) -> None:
    body = f"[{inner}]".encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_steps, "STEP_BYTES", 4)
        patch.setattr(json_steps, "SCAN_STEP_BYTES", 4)
        assert outcome_of(split, body) == outcome_of(split_json, body)


@pytest.mark.parametrize(
    "body",
    [
        b"[1,,2]",
        b"[1,2,]",
        b"[,1]",
        b"[1] 2",
        b"[1",
        b"[",
        b'["a]',
        b'[{"a":1},{"b":2,{"c":3}]',
        b"[" + b"1," * 100 + b"]",
        b"[" + b"1" * 16 + b",]",
        b"[" + b"1" * 16 + b", ]",
        b'["' + b"x" * 100 + b'\xff"]',
        b'["' + b"x" * 100 + b"\xe2",
    ],
)
@pytest.mark.usefixtures("small_steps")
def test_malformed_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidJson):
        split(body)


@pytest.mark.usefixtures("small_steps")
def test_an_empty_array_is_refused_unless_it_creates_a_stream() -> None:
    with pytest.raises(EmptyBody):
        split(b" [ ] ")
    steps = split_json_in_steps(b"[ ]", max_messages=1, max_message_bytes=1, allow_empty=True)
    assert run(steps)[0] == Messages(b"", ())


def watched_steps(build: str, patch: pytest.MonkeyPatch) -> tuple[list[int], int]:
    """The number of bytes that each step of this build will look at, and the size that a step should have."""
    looked_at: list[int] = []
    decode, scan = elements_of, native.scan

    def watched_decode(piece: bytes) -> object:
        looked_at.append(len(piece))
        return decode(piece)

    def watched_scan(body: bytes, begin: int, stop: int, max_bytes: int) -> object:
        scanned = scan(body, begin, stop, max_bytes)
        if scanned is not None:
            looked_at.append((scanned[2] or len(body)) - begin)
        return scanned

    patch.setattr(json_steps, "elements_of", watched_decode)
    patch.setattr(native, "scan", watched_scan)
    return looked_at, json_steps.STEP_BYTES if build == "pure" else json_steps.SCAN_STEP_BYTES


def test_large_body_is_split_in_many_bounded_steps(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    element = b'{"event":"click","tags":["a","b"],"text":"a, b, {c},"}'
    body = b"[" + b",".join([element] * 50_000) + b"]"
    looked_at, step_bytes = watched_steps(build, monkeypatch)
    messages, steps = run(split_json_in_steps(body, max_messages=MANY, max_message_bytes=MANY))
    assert messages.lengths == (len(element) + 1,) * 50_000
    assert messages.payload == (element + b",") * 50_000
    assert steps >= len(body) // step_bytes
    assert sum(looked_at) >= len(body) - 2 * len(looked_at) - 2
    assert max(looked_at) < step_bytes + 1000


def test_too_many_messages_are_refused_before_the_rest_is_parsed(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b"[" + b"0," * 10_000_000 + b"0]"
    looked_at, step_bytes = watched_steps(build, monkeypatch)
    with pytest.raises(TooManyMessages):
        split(body, max_messages=100_000)
    assert sum(looked_at) < 300_000 + (step_bytes if build == "compiled" else 0)


def test_a_message_above_the_limit_is_refused() -> None:
    large = json.dumps({str(at): [at, at] for at in range(30_000)}).encode()
    for body in (large, b"[1," + large + b",2]"):
        with pytest.raises(MessageTooLarge):
            split(body, max_message_bytes=100_000)
    assert split(b"[1," + large + b",2]").lengths == (2, len(large) + 1, 2)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b" " * 6_000_000, id="white space"),
        pytest.param(b" " * 3_000_000 + b"1" + b" " * 3_000_000, id="white space around a value"),
        pytest.param(b"[" + b" " * 6_000_000 + b"x]", id="white space in an array"),
        pytest.param(b'["' + rb"\n" * 3_000_000 + b'"x]', id="escapes before an error"),
        pytest.param(b'["' + rb"\n" * 3_000_000, id="escapes without an end"),
        pytest.param(b'"' + rb"\n" * 400_000 + b'"x', id="one value with escapes before an error"),
    ],
)
def test_no_step_of_a_body_without_content_is_long(body: bytes) -> None:
    """Each of them once took a step of seconds."""
    assert least(lambda: longest_step_ms(body), STEP_MAX_MS) < STEP_MAX_MS


def longest_step_ms(body: bytes) -> float:
    steps = split_json_in_steps(body, max_messages=MANY, max_message_bytes=1_000_000)
    longest_s = 0.0
    while True:
        began_s = time.thread_time()
        try:
            next(steps)
        except (StopIteration, Refusal):
            return 1000 * max(longest_s, time.thread_time() - began_s)
        longest_s = max(longest_s, time.thread_time() - began_s)


def test_half_of_a_surrogate_pair_is_named_at_the_beginning_of_a_large_body() -> None:
    with pytest.raises(InvalidJson, match="surrogate"):
        split(rb'["\ud800"' + b" " * 2_000_000 + b"]")


def test_small_bodies_are_split_in_one_call() -> None:
    assert not needs_steps(b"[" + b"0," * 30_000 + b"0]")
    assert not needs_steps(b'["' + b"x" * 1_000_000 + b'"]')
    assert needs_steps(b"[" + b"0," * 40_000 + b"0]")
    assert needs_steps(b'["' + b"x" * 2_000_000 + b'"]')
