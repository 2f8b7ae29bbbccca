"""Histories of concurrent clients, and the invariants that every history must satisfy.

Clients log each operation when it is sent and when its response arrives. `check` then checks the whole history. One
counter stamps both events, so "A completed before B was sent" is exact. An operation without a response has an unknown
outcome: it happened once, completely, or not at all, at any time after it was sent.

Kept streams are never deleted; `check_kept` compares them with their content at the end. Temporary streams are created
and deleted all the time; each creation begins with a unique marker, so a read identifies the incarnation that it saw.
The check does not depend on the number of servers: several servers of one cluster give one history.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tests.crash.workload import Violation

Kind = Literal["create", "append", "read", "tail", "delete"]
Outcome = Literal["unknown", "ok", "refused", "missing"]
"""`missing` is a 404: there was no such stream."""


class Producer(NamedTuple):
    id: str
    seq: int


@dataclass(slots=True, eq=False)
class Operation:
    """One request. Positions count bytes from the beginning of the stream."""

    kind: Kind
    stream: str
    began: int
    body: bytes = b""
    """The body of an append or a creation, or the result of a read."""
    producer: Producer | None = None
    retried: bool = False
    """Whether an earlier attempt of the same append had no response: then its offset may be a later tail."""
    start: int = 0
    end: int = 0
    """Where a read ended; the tail after an append; the tail that HEAD returned."""
    up_to_date: bool = False
    outcome: Outcome = "unknown"
    ended: int | None = None

    def before(self, other: Operation) -> bool:
        """Whether this operation completed before the other was sent."""
        return self.ended is not None and self.ended < other.began


class History:
    """The operations of all clients."""

    def __init__(self) -> None:
        self._stamps = itertools.count()
        self.operations: list[Operation] = []

    def begin(
        self, kind: Kind, stream: str, body: bytes = b"", producer: Producer | None = None, start: int = 0
    ) -> Operation:
        operation = Operation(kind, stream, next(self._stamps), body, producer, start=start)
        self.operations.append(operation)
        return operation

    def end(self, operation: Operation, outcome: Outcome) -> None:
        operation.outcome = outcome
        operation.ended = next(self._stamps)

    def by_stream(self) -> dict[str, list[Operation]]:
        found: dict[str, list[Operation]] = {}
        for operation in self.operations:
            found.setdefault(operation.stream, []).append(operation)
        return found


def check(history: History, content: dict[str, bytes]) -> Counter[str]:
    """Check everything; `content` is the final content of each kept stream. Returns counts of what was checked."""
    counts: Counter[str] = Counter()
    for stream, operations in history.by_stream().items():
        if stream in content:
            check_kept(stream, operations, content[stream])
        else:
            check_mortal(stream, operations)
        counts.update(operation.kind for operation in operations)
        counts["unknown"] += sum(operation.outcome == "unknown" for operation in operations)
    return counts


# -- streams that are kept


def check_kept(stream: str, operations: list[Operation], content: bytes) -> None:
    answered = [operation for operation in operations if operation.outcome == "ok"]
    appends = [operation for operation in answered if operation.kind == "append"]
    _offsets_are_unique(stream, appends)
    for operation in appends:
        # The response to a repeat has the tail at that time, so only the presence of the message can be checked.
        own = content[operation.end - len(operation.body) : operation.end]
        if not operation.retried and own != operation.body:
            raise Violation(f"{stream}: {operation.body[:40]!r} was acknowledged at {operation.end} but is not there")
    for operation in answered:
        if operation.kind == "read" and content[operation.start : operation.end] != operation.body:
            raise Violation(
                f"{stream}: a read from {operation.start} to {operation.end} returned data that is no longer there"
            )
    _tails_never_go_back(stream, answered)
    _each_append_once(stream, operations, content)


def _offsets_are_unique(stream: str, appends: Iterable[Operation]) -> None:
    taken: dict[int, Operation] = {}
    for operation in appends:
        if operation.retried:
            continue
        other = taken.setdefault(operation.end, operation)
        if other is not operation:
            raise Violation(f"{stream}: {operation.body[:40]!r} and {other.body[:40]!r} both end at {operation.end}")


def _tails_never_go_back(stream: str, answered: list[Operation]) -> None:
    """Every returned tail is at or after the furthest offset of any earlier response."""
    known: list[tuple[int, int]] = []
    for operation in answered:
        assert operation.ended is not None
        known.append((operation.ended, operation.end))
    known.sort()
    asking = sorted(
        (operation for operation in answered if operation.kind in {"append", "tail"} or operation.up_to_date),
        key=lambda operation: operation.began,
    )
    furthest = position = 0
    for operation in asking:
        while position < len(known) and known[position][0] < operation.began:
            furthest = max(furthest, known[position][1])
            position += 1
        if operation.end < furthest:
            raise Violation(f"{stream}: a {operation.kind} returned {operation.end} after {furthest} had been returned")


def _each_append_once(stream: str, operations: list[Operation], content: bytes) -> None:
    found = Counter(messages(content))
    tried = {operation.body for operation in operations if operation.kind in {"append", "create"}}
    if foreign := found.keys() - tried:
        raise Violation(f"{stream}: {min(foreign)[:40]!r} is there, but no client appended it")
    if twice := [body for body, count in found.items() if count > 1]:
        raise Violation(f"{stream}: {twice[0][:40]!r} is there {found[twice[0]]} times")
    refused = {operation.body for operation in operations if operation.kind == "append"} - {
        operation.body for operation in operations if operation.outcome in {"ok", "unknown"}
    }
    if ghosts := refused & found.keys():
        raise Violation(f"{stream}: {min(ghosts)[:40]!r} was rejected but is there")
    order: dict[str, list[int]] = {}
    seq_of = {operation.body: operation.producer for operation in operations if operation.producer is not None}
    for body in messages(content):
        producer = seq_of.get(body)
        if producer is not None:
            order.setdefault(producer.id, []).append(producer.seq)
    for operation in operations:
        if operation.outcome == "ok" and operation.kind == "append" and operation.body not in found:
            raise Violation(f"{stream}: {operation.body[:40]!r} was acknowledged but is missing")
    for producer_id, seqs in order.items():
        if seqs != list(range(len(seqs))):
            raise Violation(f"{stream}: the messages of {producer_id} are not there once each and in order")


def messages(content: bytes) -> list[bytes]:
    """Messages of these clients end with a semicolon, and contain none."""
    parts = content.split(b";")
    if parts.pop():
        raise Violation("a stream ends within a message")
    return [part + b";" for part in parts]


# -- temporary streams


@dataclass
class Incarnation:
    """One incarnation of a stream: its creation and the reads of it."""

    created: Operation
    reads: list[Operation] = field(default_factory=list)


def check_mortal(stream: str, operations: list[Operation]) -> None:
    lives = {operation.body: Incarnation(operation) for operation in operations if operation.kind == "create"}
    for operation in operations:
        if operation.kind == "read" and operation.outcome == "ok":
            found = messages(operation.body)
            life = lives.get(found[0]) if found else None
            if life is None:
                raise Violation(
                    f"{stream}: a read begins with {operation.body[:40]!r}, which is not the marker of a creation"
                )
            if operation.before(life.created):
                raise Violation(f"{stream}: {found[0]!r} was read before it was created")
            life.reads.append(operation)
    for marker, life in lives.items():
        if life.created.outcome == "refused" and life.reads:
            raise Violation(f"{stream}: {marker!r} was rejected but is there")
        _grows_only(stream, life)
    seen = [life for life in lives.values() if life.reads]
    deletions = [operation for operation in operations if operation.kind == "delete"]
    _no_life_returns(stream, lives.values(), deletions)
    _nothing_is_in_two_lives(stream, seen)
    appends = [operation for operation in operations if operation.kind == "append" and operation.outcome == "ok"]
    _acknowledged_is_read(stream, seen, appends)
    _missing_only_after_a_deletion(stream, operations, deletions)


def _grows_only(stream: str, life: Incarnation) -> None:
    """Reads of one incarnation are prefixes of each other, and later ones are at least as long."""
    longest = max((read.body for read in life.reads), key=len, default=b"")
    for read in life.reads:
        if not longest.startswith(read.body):
            raise Violation(f"{stream}: two reads of one incarnation differ: {read.body[:60]!r}, {longest[:60]!r}")
    for first, second in itertools.permutations(life.reads, 2):
        if first.before(second) and len(second.body) < len(first.body):
            raise Violation(f"{stream}: a read returned less than an earlier one of the same incarnation")


def _alive_until(life: Incarnation) -> list[Operation]:
    """Responses that prove that this incarnation existed."""
    return [*life.reads, *([life.created] if life.created.outcome == "ok" else [])]


def _no_life_returns(stream: str, lives: Iterable[Incarnation], deletions: list[Operation]) -> None:
    """After an incarnation has ended (deleted, or replaced by another), no later read sees it."""
    lives = list(lives)
    ends = [(deletion, None) for deletion in deletions if deletion.outcome == "ok"]
    follows: list[tuple[Operation, Incarnation | None]] = [*ends]
    for life in lives:
        follows += [(proof, life) for proof in _alive_until(life)]
    for life in lives:
        proofs = _alive_until(life)
        for end, successor in follows:
            if successor is life:
                continue
            if successor is not None:
                # The other incarnation existed at this time; it is a later one only if created after this one was seen.
                ended = any(proof.before(successor.created) for proof in proofs)
            else:
                ended = any(proof.before(end) for proof in proofs)
            if ended and any(end.before(read) for read in life.reads):
                raise Violation(f"{stream}: {life.created.body!r} was read after it had ended ({end.kind})")


def _nothing_is_in_two_lives(stream: str, lives: list[Incarnation]) -> None:
    owner: dict[bytes, Incarnation] = {}
    for life in lives:
        longest = max((read.body for read in life.reads), key=len)
        found = messages(longest)
        if len(set(found)) != len(found):
            raise Violation(f"{stream}: a message is there twice")
        for body in found:
            if owner.setdefault(body, life) is not life:
                raise Violation(f"{stream}: {body!r} is in two incarnations")


def _acknowledged_is_read(stream: str, lives: list[Incarnation], appends: list[Operation]) -> None:
    """An append while an incarnation certainly existed is in every later read of it."""
    for life in lives:
        proofs = _alive_until(life)
        for append in appends:
            if not any(proof.before(append) for proof in proofs):
                continue
            for read in life.reads:
                if append.before(read) and append.body not in read.body:
                    raise Violation(f"{stream}: {append.body!r} was acknowledged and is missing from a later read")


def _missing_only_after_a_deletion(stream: str, operations: list[Operation], deletions: list[Operation]) -> None:
    """A 404 requires a deletion that may have happened after the last creation."""
    created = [operation for operation in operations if operation.kind == "create" and operation.outcome == "ok"]
    for operation in operations:
        if operation.outcome != "missing" or operation.kind == "delete":
            continue
        earlier = [each for each in created if each.before(operation)]
        if not earlier:
            continue
        last = max(earlier, key=lambda each: each.began)
        possible = [
            each
            for each in deletions
            if each.began < (operation.ended or 0) and not each.before(last) and each.outcome in {"ok", "unknown"}
        ]
        if not possible:
            raise Violation(f"{stream}: a {operation.kind} returned 404, but no request had deleted {last.body!r}")
