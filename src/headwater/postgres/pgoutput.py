"""Decode the messages of Postgres's `pgoutput` plugin (protocol 1, text values) into transactions.

This module only decodes bytes and does not talk to a database. Invariant: a transaction is returned only when it is
complete, after its commit; a value that is not in the WAL (a large one that did not change) is never mistaken for NULL.
"""

from __future__ import annotations

import datetime as dt
import enum
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Final, Literal

from headwater.postgres.values import Convert, UserType, converter

Operation = Literal["insert", "update", "delete", "truncate"]
Row = dict[str, Any]

_EPOCH: Final = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_u16: Final = struct.Struct("!H").unpack_from
_u32: Final = struct.Struct("!I").unpack_from
_begin: Final = struct.Struct("!QqI").unpack_from
_commit: Final = struct.Struct("!BQQq").unpack_from
_length: Final = struct.Struct("!I")


class PgoutputError(Exception):
    """The bytes are not valid output of the plugin: another protocol, or a message of a future version."""


class _Missing(enum.Enum):
    UNCHANGED = "unchanged"


UNCHANGED: Final = _Missing.UNCHANGED


@dataclass(frozen=True, slots=True)
class RelationColumn:
    name: str
    type_oid: int
    in_key: bool
    """Part of the replica identity."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as it was when the following changes were made."""

    oid: int
    schema: str
    table: str
    identity: str
    """`d` default (primary key), `n` nothing, `f` full, `i` index."""
    columns: tuple[RelationColumn, ...]
    converters: tuple[Convert, ...] = field(repr=False, compare=False)
    name: str = field(init=False, compare=False)
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Converters of the columns; stored, because every value of every change needs one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.schema}.{self.table}")
        object.__setattr__(self, "names", tuple(column.name for column in self.columns))

    @property
    def key_columns(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns if column.in_key)


@dataclass(frozen=True, slots=True)
class RowChange:
    operation: Operation
    relation: Relation
    new: Row | None = None
    old: Row | None = None
    """The old key, if it changed or the row was deleted; the whole old row if the table has REPLICA IDENTITY FULL."""
    unchanged: tuple[str, ...] = ()
    """Columns whose (large) values are not in the WAL because they did not change."""


@dataclass(slots=True)
class Transaction:
    xid: int
    committed_at: dt.datetime
    changes: list[RowChange] = field(default_factory=list)
    end_lsn: int = 0
    """The position after its commit."""
    commit_lsn: int = 0
    """Where its commit record begins; those of later transactions begin after it."""


@dataclass(slots=True)
class StreamedTransaction:
    """A transaction of any size, whose changes are decoded during iteration; they can be iterated only once."""

    xid: int
    committed_at: dt.datetime
    end_lsn: int
    changes: Iterator[RowChange]


class Decoder:
    """A decoder. Feed it messages in order; it returns a transaction when one is complete."""

    def __init__(self, user_types: Mapping[int, UserType] | None = None, *, as_text: bool = False) -> None:
        self._made_types = user_types or {}
        self._as_text = as_text
        """Keep every value as the text that Postgres wrote."""
        self._relations: dict[int, Relation] = {}
        self._open: Transaction | None = None
        self._readers: dict[int, Callable[[bytes], Sequence[RowChange]]] = {
            ord("R"): self._on_relation,
            ord("I"): self._on_insert,
            ord("U"): self._on_update,
            ord("D"): self._on_delete,
            ord("T"): self._on_truncate,
            # Origins, user-defined types and messages of applications do not describe rows.
            ord("O"): _nothing,
            ord("Y"): _nothing,
            ord("M"): _nothing,
        }

    @property
    def is_within_transaction(self) -> bool:
        return self._open is not None

    def feed(self, message: bytes) -> Transaction | None:
        match message[0]:
            case 66:  # B: begin
                self._open = _begun(message)
            case 67:  # C: commit
                done = self._current()
                self._open = None
                _, done.commit_lsn, done.end_lsn, _ = _commit(message, 1)
                return done
            case _:
                changes = self._decoded(message)
                if changes:
                    self._current().changes += changes
        return None

    def stream(
        self, messages: Iterable[bytes], start: int, end: int, memory_max: int = 32 << 20
    ) -> Iterator[StreamedTransaction]:
        """The transactions that end in (start, end].

        The end of a transaction is known only at its commit, so its messages are buffered until then: in memory up to
        `memory_max` bytes, and beyond that in a temporary file. Iterate the changes before the next transaction.
        """
        with tempfile.SpooledTemporaryFile(max_size=memory_max) as spool:
            begun: Transaction | None = None
            for message in messages:
                if message[0] == 66:
                    begun = _begun(message)
                    spool.seek(0)
                    spool.truncate()
                elif message[0] == 67:
                    if begun is None:
                        raise PgoutputError("Postgres sent a commit without a begin.")
                    end_lsn = _commit(message, 1)[2]
                    spool.seek(0)
                    if start < end_lsn <= end:
                        changes = self._spooled(spool, None)
                        yield StreamedTransaction(begun.xid, begun.committed_at, end_lsn, changes)
                        # Messages that the caller did not iterate may describe tables of later transactions.
                        for _ in changes:
                            pass
                    else:
                        for _ in self._spooled(spool, ord("R")):
                            pass
                else:
                    spool.write(_length.pack(len(message)))
                    spool.write(message)

    def _spooled(self, spool: IO[bytes], kind: int | None) -> Iterator[RowChange]:
        while head := spool.read(_length.size):
            message = spool.read(_length.unpack(head)[0])
            if kind is None or message[0] == kind:
                yield from self._decoded(message)

    def _decoded(self, message: bytes) -> Sequence[RowChange]:
        reader = self._readers.get(message[0])
        if reader is None:
            raise PgoutputError(f"Postgres sent a message of kind {chr(message[0])!r}, which protocol 1 does not have.")
        return reader(message)

    def _on_relation(self, message: bytes) -> Sequence[RowChange]:
        (oid,) = _u32(message, 1)
        schema, at = _string(message, 5)
        table, at = _string(message, at)
        identity = chr(message[at])
        (count,) = _u16(message, at + 1)
        at += 3
        columns: list[RelationColumn] = []
        for _ in range(count):
            in_key = bool(message[at] & 1)
            name, at = _string(message, at + 1)
            columns.append(RelationColumn(name, _u32(message, at)[0], in_key))
            at += 8
        converters = tuple(
            _same if self._as_text else converter(column.type_oid, self._made_types) for column in columns
        )
        # pg_catalog is sent as an empty name.
        self._relations[oid] = Relation(oid, schema or "pg_catalog", table, identity, tuple(columns), converters)
        return ()

    def _on_insert(self, message: bytes) -> Sequence[RowChange]:
        relation = self._relation(message)
        new, _, _ = _tuple(message, 6, relation)
        return (RowChange("insert", relation, new),)

    def _on_update(self, message: bytes) -> Sequence[RowChange]:
        relation = self._relation(message)
        at = 5
        old: Row | None = None
        if message[at] in b"KO":
            whole = message[at] == ord("O")
            old, at, _ = _tuple(message, at + 1, relation)
            if not whole:
                old = _key_of(old, relation)
        new, _, unchanged = _tuple(message, at + 1, relation)
        missing: list[str] = []
        for name in unchanged:
            if old is not None and name in old:
                new[name] = old[name]
            else:
                missing.append(name)
        return (RowChange("update", relation, new, old, tuple(missing)),)

    def _on_delete(self, message: bytes) -> Sequence[RowChange]:
        relation = self._relation(message)
        old, _, _ = _tuple(message, 6, relation)
        if message[5] == ord("K"):
            old = _key_of(old, relation)
        return (RowChange("delete", relation, None, old),)

    def _on_truncate(self, message: bytes) -> Sequence[RowChange]:
        (count,) = _u32(message, 1)
        relations = (self._relations[_u32(message, 6 + 4 * number)[0]] for number in range(count))
        return [RowChange("truncate", relation) for relation in relations]

    def _current(self) -> Transaction:
        if self._open is None:
            raise PgoutputError("Postgres sent a change outside of a transaction.")
        return self._open

    def _relation(self, message: bytes) -> Relation:
        return self._relations[_u32(message, 1)[0]]


def _nothing(_: bytes) -> Sequence[RowChange]:
    return ()


def _begun(message: bytes) -> Transaction:
    _, committed_us, xid = _begin(message, 1)
    return Transaction(xid, _EPOCH + dt.timedelta(microseconds=committed_us))


def _same(text: str) -> str:
    return text


def _string(message: bytes, at: int) -> tuple[str, int]:
    end = message.index(b"\0", at)
    return message[at:end].decode(), end + 1


def _tuple(message: bytes, at: int, relation: Relation) -> tuple[Row, int, list[str]]:
    """The row, the position after it, and the columns that are not in the WAL."""
    (count,) = _u16(message, at)
    at += 2
    row: Row = {}
    unchanged: list[str] = []
    names, converters = relation.names, relation.converters
    for number in range(count):
        kind = message[at]
        at += 1
        if kind == 116:  # t: text
            (length,) = _u32(message, at)
            at += 4
            row[names[number]] = converters[number](message[at : at + length].decode())
            at += length
        elif kind == 110:  # n: NULL
            row[names[number]] = None
        elif kind == 117:  # u: unchanged and not in the WAL
            unchanged.append(names[number])
        else:
            raise PgoutputError(f"Postgres sent a value of kind {chr(kind)!r}, but only text was requested.")
    return row, at, unchanged


def _key_of(row: Row, relation: Relation) -> Row:
    """The columns of an old key; the others are sent as NULL and are meaningless."""
    if relation.identity == "f":
        # The row is in a partition whose replica identity differs from that of its table. A key has no NULL.
        return {name: value for name, value in row.items() if value is not None}
    return {name: row[name] for name in relation.key_columns if name in row}
