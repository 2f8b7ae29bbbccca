"""The synchronous producer: `append` queues messages, and a thread sends them in batches that form while it waits."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self, Unpack

from headwater.client.effects import Attempts
from headwater.client.errors import ClientError, ConnectionLostError, ProducerFencedError, ProducerGapError
from headwater.client.http1 import split_url
from headwater.client.operations import Message, StreamOperations
from headwater.client.producing import ProducerCore, ProducerOptions, ProducerSettings
from headwater.client.sync_session import SyncSession
from headwater.client.sync_transport import SyncConnection


class Producer:
    """Appends exactly once, in order. Failed requests are retried with the same sequence number.

    `append` returns immediately; `flush` waits until everything is stored. The next call raises an error that retries
    cannot fix, and nothing is sent after it.
    """

    def __init__(
        self, session: SyncSession, operations: StreamOperations, producer_id: str, **options: Unpack[ProducerOptions]
    ) -> None:
        self._session = session
        self._operations = operations
        content_type = session.run(operations.known_content_type())
        self._core = ProducerCore(producer_id, operations.url, ProducerSettings(**options), content_type)
        self._changed = threading.Condition()
        self._error: ClientError | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"producer {producer_id}", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        return self._core.epoch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.stop()

    def append(self, message: Message) -> None:
        """Queue one message; blocks only while the buffer is full."""
        with self._changed:
            while self._core.is_full and self._error is None:
                self._changed.wait()
            self._check()
            self._core.add(message)
            self._changed.notify_all()

    def flush(self) -> str:
        """Wait until everything is stored; return the offset after it, or an empty string if nothing was appended."""
        with self._changed:
            while not self._core.is_empty and self._error is None and not self._stopping:
                self._changed.wait()
            self._check()
            return self._core.next_offset

    def close_stream(self) -> str:
        """Flush, then close the stream with the next sequence number; return its last offset."""
        self.flush()
        while True:
            closing = self._operations.append_body(b"", close=True, producer=self._core.close_stamp())
            try:
                return self._session.run(closing).next_offset
            except ProducerFencedError as error:
                self._core.failed(error)

    def stop(self) -> None:
        """Stop the producer. Messages that are not stored yet may be lost: `flush` first."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._stopping:
            raise ConnectionLostError(f"{self._operations.url}: the producer was stopped")

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._send_all()
        except ClientError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _send_all(self) -> None:
        attempts = Attempts(self._session.policy)
        connection: SyncConnection | None = None
        try:
            while self._wait_for_work():
                try:
                    if connection is None:
                        connection = self._session.transport.connect(split_url(self._operations.url)[0])
                    self._exchange(connection)
                    attempts.succeeded()
                except ClientError as error:
                    if connection is not None:
                        connection.close()
                        connection = None
                    with self._changed:
                        at_once = self._core.failed(error)
                    if not at_once:
                        wait = attempts.failed(transient(error))
                        with self._changed:
                            self._changed.wait_for(lambda: self._stopping, wait.seconds)
        finally:
            if connection is not None:
                connection.close()

    def _wait_for_work(self) -> bool:
        with self._changed:
            while self._core.is_empty and not self._stopping:
                self._changed.wait()
            return not self._stopping

    def _exchange(self, connection: SyncConnection) -> None:
        """Send as many batches as the window allows, then receive one response."""
        client = self._session
        while True:
            with self._changed:
                request = self._core.next_request()
            if request is None:
                break
            connection.send(request, client.headers.of(request), client.timeout_s)
        response = connection.response()
        with self._changed:
            self._core.answered(response)
            self._changed.notify_all()
        if not response.keep_alive:
            raise ConnectionLostError(f"{self._operations.url}: the server ended the connection")


def transient(error: ClientError) -> ClientError:
    """Treat a sequence gap as transient: the failure before it caused it, and resending in order closes it."""
    return ConnectionLostError(str(error)) if isinstance(error, ProducerGapError) else error
