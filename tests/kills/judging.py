"""Check what each direction has delivered, over plain HTTP, SQL and Parquet: each message once, in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg

from headwater.pipeline.archive.table import ArchiveTable
from tests.kills.feeding import FOLDS, LAKE, Change, Written
from tests.pipeline.buckets import bootstrapped
from tests.pipeline.test_archive import held
from tests.pipeline.test_fold import entries, rows
from tests.spark.streams import Streams


@dataclass(frozen=True, slots=True)
class Judge:
    """Compares the targets with what was written."""

    url: str
    postgres: str
    lake: Path
    http: httpx.Client

    def missing(self, written: Written, directions: tuple[str, ...]) -> str:
        """What has not arrived yet; empty if nothing is missing."""
        for name in directions:
            try:
                found = _DIRECTIONS[name][0](self, written)
            except (httpx.HTTPError, psycopg.Error, OSError) as error:
                found = repr(error)
            if found:
                return f"{name}: {found}"
        return ""

    def judge(self, written: Written, directions: tuple[str, ...], what: str) -> None:
        for path, sent in written.of("/v1/stream/").items():
            assert self._streams("/v1/stream").messages(path) == sent, f"the source stream {path} is wrong; {what}"
        for name in directions:
            _DIRECTIONS[name][1](self, written, f"{name}; {what}")

    def _streams(self, root: str) -> Streams:
        return Streams(self.url + root, self.http)

    def copy_missing(self, written: Written) -> str:
        streams = self._streams("/v1/stream")
        for name, sent in written.of("/v1/stream/").items():
            copied = len(streams.raw(f"copy-of-{name}")) if streams.exists(f"copy-of-{name}") else 0
            if copied < len(sent):
                return f"{copied} of {len(sent)} messages of {name}"
        return ""

    def judge_copy(self, written: Written, what: str) -> None:
        for name, sent in written.of("/v1/stream/").items():
            judge_order(self._streams("/v1/stream").messages(f"copy-of-{name}"), sent, f"{name}; {what}")

    def table_missing(self, written: Written) -> str:
        wanted = sum(len(sent) for sent in written.of("/v1/stream/").values())
        with psycopg.connect(self.postgres) as connection:
            found = connection.execute("SELECT count(*) FROM session_events").fetchone()
        assert found is not None
        return "" if found[0] >= wanted else f"{found[0]} of {wanted} rows"

    def judge_table(self, written: Written, what: str) -> None:
        for name, sent in written.of("/v1/stream/").items():
            with psycopg.connect(self.postgres) as connection:
                found = connection.execute(
                    "SELECT payload FROM session_events WHERE stream_name = %s ORDER BY id", [name]
                ).fetchall()
            judge_order([row[0] for row in found], sent, f"{name}; {what}")

    def changes_missing(self, written: Written) -> str:
        streams = self._streams("/v1/stream")
        found = self._table_messages() if streams.exists("ledger") else []
        is_complete = current_rows([change for _, change in found]) == current_rows(written.changes)
        return "" if is_complete else f"{len(found)} messages for {len(written.changes)} changes"

    def judge_changes(self, written: Written, what: str) -> None:
        """Check that the stream has first the rows that the table had when it was copied, then every later change."""
        found = self._table_messages()
        copied = [change for is_copy, change in found if is_copy]
        rest = [change for is_copy, change in found if not is_copy]
        assert found[: len(copied)] == [(True, change) for change in copied], f"a copied row after a change; {what}"
        at = len(written.changes) - len(rest)
        assert at >= 0, f"duplicated, or never written; {what}"
        judge_order(rest, written.changes[at:], what)
        first = current_rows(written.changes[:at])
        assert sorted(copied) == sorted(("insert", key, value) for key, value in first.items()), f"the copy; {what}"

    def _table_messages(self) -> list[tuple[bool, Change]]:
        """The messages about the table, and whether each belongs to the first copy."""
        return [
            (
                "lsn" not in one["headers"],
                (one["headers"]["operation"], one["key"], (one.get("value") or {}).get("n")),
            )
            for one in self._streams("/v1/stream").messages("ledger")
        ]

    def folds_missing(self, written: Written) -> str:
        streams = self._streams(f"/ds/{FOLDS}")
        with psycopg.connect(self.postgres) as connection:
            places: dict[str, str] = dict(connection.execute("SELECT stream, ds_offset FROM folds_places").fetchall())
        for name, sent in written.of(f"/ds/{FOLDS}/").items():
            head = self.http.head(f"{streams.root}/{name}").raise_for_status().headers
            tail = head["Stream-Next-Offset"]
            if sent and (places.get(name), head.get("Stream-Snapshot-Offset")) != (tail, tail):
                return f"{name} is folded to {places.get(name)} of {tail}"
        return ""

    def judge_folds(self, written: Written, what: str) -> None:
        table = rows(self.postgres)
        for name, sent in written.of(f"/ds/{FOLDS}/").items():
            assert table.get(name, {}) == entries(sent), f"the table of {name}; {what}"
            judge_state(f"{self.url}/ds/{FOLDS}/{name}", sent, what)

    def archive_missing(self, written: Written) -> str:
        streams, archived = self._streams(f"/ds/{LAKE}"), ArchiveTable(self.lake).positions()
        for name, sent in written.of(f"/ds/{LAKE}/").items():
            if sent and (name not in archived or archived[name].offset != streams.tail(name)):
                return f"{name} is not archived to its end"
        return ""

    def judge_archive(self, written: Written, what: str) -> None:
        archived = held(self.lake)
        for name, sent in written.of(f"/ds/{LAKE}/").items():
            judge_order(archived.get(name, []), sent, f"{name}; {what}")
            judge_state(f"{self.url}/ds/{LAKE}/{name}", sent, what)


_DIRECTIONS: dict[str, tuple[Callable[[Judge, Written], str], Callable[[Judge, Written, str], None]]] = {
    "stream to stream": (Judge.copy_missing, Judge.judge_copy),
    "stream to Postgres": (Judge.table_missing, Judge.judge_table),
    "Postgres to stream": (Judge.changes_missing, Judge.judge_changes),
    "fold": (Judge.folds_missing, Judge.judge_folds),
    "archive": (Judge.archive_missing, Judge.judge_archive),
}
ALL = tuple(_DIRECTIONS)


def current_rows(changes: list[Change]) -> dict[str, int | None]:
    rows: dict[str, int | None] = {}
    for operation, key, value in changes:
        if operation == "delete":
            rows.pop(key, None)
        else:
            rows[key] = value
    return rows


def judge_order(found: list[Any], sent: list[Any], what: str) -> None:
    """Compare two lists, with an error that says what is wrong."""
    if found == sent:
        return
    seen = [json.dumps(one, sort_keys=True) for one in found]
    wanted = [json.dumps(one, sort_keys=True) for one in sent]
    if sorted(seen) == sorted(wanted):
        raise AssertionError(f"out of order; {what}")
    for one in wanted:
        assert seen.count(one) >= wanted.count(one), f"lost: {one}; {what}"
    for one in seen:
        assert seen.count(one) <= wanted.count(one), f"duplicated, or never sent: {one}; {what}"


def judge_state(url: str, sent: list[Any], what: str) -> None:
    """Check that a client that bootstraps has the whole state, even after trimming."""
    mine = {key: json.loads(entry.value) for key, entry in bootstrapped(url).entries.items()}
    assert mine == entries(sent), f"the state of {url}; {what}"
