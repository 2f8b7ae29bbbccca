"""The multipart boundary of a bootstrap never occurs in a part: if it does, it is replaced or the response is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headwater.core.errors import Refusal
from headwater.core.rules import CreateRequest
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.http.bootstrap import BootstrapBody, BoundaryFoundError, BoundaryWatch, closing, complete, new_boundary
from headwater.storage.memory import MemoryStorage
from tests.engine.seams import ManualClock, ManualScheduler

TAKEN, FREE = b"taken-boundary", b"free-boundary"


def must_work(result: object) -> None:
    assert not isinstance(result, Refusal), result


class Fixture:
    """A stream in a bucket, with a snapshot before its last messages."""

    def __init__(self, snapshot: bytes, messages: list[bytes]) -> None:
        clock = ManualClock()
        self.engine = Engine(MemoryStorage(), clock, ManualScheduler(clock), EngineLimits())
        self.engine.start()
        self.engine.buckets.create("bucket", must_work)
        request = CreateRequest("/ds/bucket/s", "text/plain", None, None, False, b"folded")
        self.engine.buckets.create_stream("bucket", request, must_work)
        for message in messages:
            self.engine.append("/ds/bucket/s", "text/plain", message, None, None, False, must_work)
        upload = self.engine.snapshots.upload()
        upload.write(snapshot)
        at = "0000000000000001_0000000000000006"
        self.engine.snapshots.publish("/ds/bucket/s", at, "a/b", upload, must_work)

    def answer(self) -> BootstrapBody:
        stream = self.engine.look_up("/ds/bucket/s")
        return BootstrapBody(self.engine, stream, self.engine.snapshots.open(stream))


@pytest.mark.parametrize(
    ("snapshot", "messages"),
    [
        (b"x" + TAKEN + b"y", [b"m"]),
        (TAKEN, []),
        (b"s", [b"a", b"\r\n--" + TAKEN + b"--\r\n", b"b"]),
        (b"s", [b"x" * 300_000 + TAKEN]),
        # Split across two pages of the snapshot, and across two slices of a message.
        (b"x" * (256 * 1024 - 5) + TAKEN, [b"m"]),
        (b"s", [b"x" * (256 * 1024 - 5) + TAKEN + b"x" * 1000]),
    ],
)
def test_a_boundary_that_occurs_in_a_part_is_not_used(snapshot: bytes, messages: list[bytes]) -> None:
    fixture = Fixture(snapshot, messages)
    choices: Iterator[bytes] = iter([TAKEN, TAKEN, FREE])
    boundary, body = complete(fixture.answer(), lambda: next(choices))
    assert boundary == FREE
    assert body.count(FREE) == 2 + len(messages)
    # A large response has already begun: it ends before the piece that contains the boundary.
    answer = fixture.answer()
    sent: list[bytes | memoryview] = []
    with pytest.raises(BoundaryFoundError):
        sent.extend(closing(answer, TAKEN))
    assert sum(map(len, sent)) < answer.length()


def test_error_is_reported_when_no_boundary_is_possible() -> None:
    with pytest.raises(BoundaryFoundError):
        complete(Fixture(TAKEN, []).answer(), lambda: TAKEN)


def test_length_is_known_in_advance() -> None:
    for snapshot, messages in ((b"", []), (b"s" * 1000, [b"a", b"bc"]), (b"s" * 600_000, [b"x" * 300_000, b"y"])):
        answer = Fixture(snapshot, messages).answer()
        assert sum(map(len, closing(answer, new_boundary()))) == answer.length()


def test_abandoned_response_releases_its_pin() -> None:
    fixture = Fixture(b"s" * 600_000, [b"x" * 1000])
    slices = closing(fixture.answer(), new_boundary())
    next(slices)
    assert fixture.engine.retention._pins
    slices.close()
    assert not fixture.engine.retention._pins


def pass_all(*pieces: bytes) -> None:
    watch = BoundaryWatch(TAKEN)
    for piece in pieces:
        watch.check(piece)


def test_boundary_is_found_across_any_split() -> None:
    text = b"--" + TAKEN + b"--"
    for cut in range(len(text) + 1):
        with pytest.raises(BoundaryFoundError):
            pass_all(b"before", text[:cut], b"", text[cut:])
    watch = BoundaryWatch(TAKEN)
    for byte in TAKEN[:-1] * 5:
        watch.check(bytes([byte]))
