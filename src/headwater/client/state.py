"""Follow a stream as state: bootstrap, follow, and bootstrap again if retention drops unread messages. No I/O.

Invariant: after a `restore`, a state sees every message after its snapshot, once and in order. If a bootstrap fails
halfway, it is repeated, with another `restore`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headwater.client.effects import Attempts, Emit, HttpRequest, Open, Operation, Receive, log
from headwater.client.errors import ClientError, HistoryMissingError, MalformedResponseError, OffsetGoneError, error_of
from headwater.client.http1 import HttpResponse
from headwater.client.multipart import MultipartParser, PartEnd, PartStart, boundary_of
from headwater.client.operations import StreamOperations
from headwater.client.reading import Follower, Live, Position
from headwater.client.results import Batch, BootstrapInfo, Snapshot


class State(Protocol):
    """A state that is built from the messages of a stream."""

    def restore(self, snapshot: Snapshot | None) -> None:
        """Discard everything and start from a snapshot, or empty. May be called at any time."""

    def apply(self, message: bytes) -> None:
        """Apply the next message."""


@dataclass(frozen=True, slots=True)
class StateProgress:
    """The position of a state."""

    next_offset: str
    up_to_date: bool
    closed: bool
    restored: bool
    """The state was just built from a bootstrap."""


def open_bootstrap(operations: StreamOperations) -> Operation[tuple[BootstrapInfo, HttpResponse, MultipartParser]]:
    """Request the snapshot and the messages after it. The response is received in pieces."""
    url = f"{operations.url}/bootstrap"
    response: HttpResponse = yield Open(HttpRequest("GET", url))
    if response.status != 200:
        pieces: list[bytes] = []
        while piece := (yield Receive(response)):
            pieces.append(piece)
        raise error_of("GET", url, response.status, response.headers, b"".join(pieces))
    parser = MultipartParser(boundary_of(response.headers.get("content-type", "")))
    return BootstrapInfo.of(response), response, parser


def bootstrap(operations: StreamOperations) -> Operation[None]:
    """Emit a `BootstrapInfo`, then the events of all parts."""
    info, response, parser = yield from open_bootstrap(operations)
    yield Emit(info)
    while data := (yield Receive(response)):
        for event in parser.feed(data):
            yield Emit(event)
    parser.finish()


def follow_state(operations: StreamOperations, state: State, *, live: Live, allow_missing: bool) -> Operation[None]:
    """Keep a state up to date; emits a `StateProgress` after every step.

    If retention dropped messages that no snapshot covers, raises `HistoryMissingError`; with `allow_missing` the state
    starts with the remaining messages.
    """
    attempts = Attempts(operations.policy)
    while True:
        try:
            at = yield from _restore(operations, state, allow_missing=allow_missing)
        except ClientError as error:
            wait = attempts.failed(error)
            yield wait
            continue
        attempts.succeeded()
        yield Emit(StateProgress(at.offset, up_to_date=True, closed=at.closed, restored=True))

        def apply(batch: Batch) -> StateProgress:
            for message in batch.messages:
                state.apply(message)
            return StateProgress(batch.next_offset, batch.up_to_date, batch.closed, restored=False)

        try:
            return (yield from Follower(operations, at, live, apply, exact=True).batches())
        except OffsetGoneError:
            log.info("%s: retention dropped unread messages, bootstrapping again", operations.url)


def _restore(operations: StreamOperations, state: State, *, allow_missing: bool) -> Operation[Position]:
    info, response, parser = yield from open_bootstrap(operations)
    if info.missing_before is not None and not allow_missing:
        raise HistoryMissingError(
            f"{operations.url}: messages before {info.missing_before} were deleted and no snapshot covers them"
        )
    content_type = ""
    pieces: list[bytes] = []
    parts = 0
    while data := (yield Receive(response)):
        for event in parser.feed(data):
            if isinstance(event, PartStart):
                content_type, pieces = event.content_type, []
            elif isinstance(event, PartEnd):
                body = b"".join(pieces)
                parts += 1
                if parts > 1:
                    state.apply(body)
                else:
                    state.restore(Snapshot(info.snapshot_offset, content_type, body) if info.has_snapshot else None)
            else:
                pieces.append(event)
    parser.finish()
    if not parts:
        raise MalformedResponseError("the bootstrap has no parts")
    at = Position(info.next_offset, position=info.position)
    at.closed = info.closed
    at.content_type = yield from operations.known_content_type()
    return at
