"""Follow a server's listing of changed streams: a thread keeps one long-poll open and collects the changes.

Invariant: after `open`, a later `take` reports every change of a stream with the prefix, or its net result.
"""

from __future__ import annotations

import threading

from headwater.spark.errors import HeadwaterError
from headwater.spark.protocol import Head, StreamsClient

Changes = dict[str, Head | None]
"""The new head of each stream that changed; None if it was deleted."""


class ChangeFeed:
    """The changes of the streams with a prefix."""

    def __init__(self, client: StreamsClient, prefix: str, cursor: str) -> None:
        self._client = client
        self._prefix = prefix
        self._cursor = cursor
        self._condition = threading.Condition()
        self._changes: Changes = dict(client.tails(prefix))
        self._is_complete = True
        self._error: HeadwaterError | None = None
        self._closed = False
        threading.Thread(target=self._follow, name="headwater-changes", daemon=True).start()

    @classmethod
    def open(cls, client: StreamsClient, prefix: str) -> ChangeFeed:
        """Start following. Raises the server's error if it has no listing of changes."""
        current = client.changes(prefix, None)
        assert current is not None, "without a cursor the server responds immediately"
        return cls(client, prefix, current.cursor)

    def take(self, timeout_s: float) -> tuple[Changes, bool]:
        """The changes since the last call, and whether they are the complete list of streams instead."""
        with self._condition:
            self._await(timeout_s)
            if self._error is not None:
                raise self._error
            changes, self._changes = self._changes, {}
            is_complete, self._is_complete = self._is_complete, False
            return changes, is_complete

    def wait(self, timeout_s: float) -> None:
        """Wait for a change."""
        with self._condition:
            self._await(timeout_s)

    def close(self) -> None:
        """Stop following. The thread ends when its current long-poll does."""
        self._closed = True

    def _await(self, timeout_s: float) -> None:
        self._condition.wait_for(lambda: self._changes or self._is_complete or self._error is not None, timeout_s)

    def _follow(self) -> None:
        while not self._closed:
            try:
                changed = self._client.changes(self._prefix, self._cursor)
                if changed is None:
                    continue
                listed = self._client.tails(self._prefix) if changed.is_reset else None
            except HeadwaterError as error:
                with self._condition:
                    self._error = error
                    self._condition.notify_all()
                return
            self._cursor = changed.cursor
            with self._condition:
                if listed is None:
                    self._changes |= changed.heads
                else:
                    self._changes, self._is_complete = dict(listed), True
                self._condition.notify_all()
