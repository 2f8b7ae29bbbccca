"""The control socket of a running server: commands of the CLI, over a Unix socket in the data directory.

A request is one JSON object on a line, and so is its response:

    {"ask": "stats"}           describe the content of the store
    {"ask": "hold"}            keep all files of the store until this connection ends, for a backup
    {"ask": "rotate"}          create the next key that signs webhooks
    {"ask": "confirm-expiry"}  delete the expired streams that are kept after a clock jump
    {"ask": "pause"}           close the store until this connection ends (`pause`)

A hold only defers the deletion of files. Another process makes the copy, and the hold ends when it disconnects.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from headwater.core.errors import Refusal
from headwater.core.signing import SigningKey
from headwater.engine.engine import Engine
from headwater.engine.open_storage import Store
from headwater.engine.pause import StorePause
from headwater.engine.stream import LiveStream
from headwater.engine.subscriptions import Subscriptions
from headwater.storage import control_socket
from headwater.storage.journaled_store import JournaledStorage
from headwater.storage.stream_stats import StreamStats

if TYPE_CHECKING:
    from headwater.config import StorageSettings

log = logging.getLogger("headwater.engine")

STREAMS_PER_SLICE: Final = 5000
"""Streams that are counted in one iteration of the event loop: about a millisecond."""


class ControlRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ask: Literal["stats", "hold", "rotate", "confirm-expiry", "pause"]


_requests: Final = msgspec.json.Decoder(ControlRequest)


class HoldAnswer(msgspec.Struct, frozen=True):
    held: bool
    mode: str
    pid: int


class StatsAnswer(msgspec.Struct, frozen=True):
    mode: str
    pid: int
    contents: StreamStats
    memory_bytes: int
    """Message bytes held in memory for the modes that write them to files later."""
    parts: dict[str, int]


class RotateAnswer(msgspec.Struct, frozen=True):
    kid: str
    signs_from_ms: int


class ConfirmAnswer(msgspec.Struct, frozen=True):
    released: int
    """Expired streams that are deleted now."""


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: str


class ControlServer:
    def __init__(
        self,
        engine: Engine,
        store: Store,
        subscriptions: Subscriptions | None,
        directory: Path,
        mode: str,
        pause: StorePause | None,
    ) -> None:
        self._engine = engine
        self._store = store
        self._subscriptions = subscriptions
        self._directory = directory
        self._mode = mode
        self._pause = pause
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Start listening. Without a control socket, only the commands that need it fail; the server still starts."""
        try:
            listening = control_socket.listening_socket(self._directory)
        except OSError as error:
            log.warning("no control socket in %s, so a backup needs a stopped server: %s", self._directory, error)
            return
        self._server = await asyncio.start_unix_server(
            self._on_connect, sock=listening, limit=control_socket.LINE_MAX_BYTES
        )

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        control_socket.remove(self._directory)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        holds = 0
        is_taken_over = False
        try:
            while line := await reader.readline():
                try:
                    ask = _requests.decode(line).ask
                except msgspec.MsgspecError as error:
                    answer: msgspec.Struct = ErrorAnswer(f"The request is not valid: {error}")
                else:
                    if ask == "hold":
                        self._store.files.hold()
                        holds += 1
                        answer = HoldAnswer(True, self._mode, os.getpid())
                    elif ask == "pause":
                        is_taken_over = self._pause is not None and self._pause.request(reader, writer)
                        if is_taken_over:
                            return
                        answer = ErrorAnswer("this server cannot close its store while it runs; stop it first")
                    elif ask == "rotate":
                        answer = await self._rotate()
                    elif ask == "confirm-expiry":
                        answer = await self._confirm_expiry()
                    else:
                        answer = await self._stats()
                writer.write(msgspec.json.encode(answer) + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):
            # The client disconnected, or sent a line that is too long.
            pass
        finally:
            for _ in range(holds):
                await asyncio.shield(asyncio.to_thread(self._store.files.release))
            if not is_taken_over:
                with suppress(OSError):
                    writer.close()

    async def _rotate(self) -> RotateAnswer | ErrorAnswer:
        if self._subscriptions is None:
            return ErrorAnswer("subscriptions are disabled on this server, so there is no signing key")
        durable: asyncio.Future[SigningKey | Refusal] = asyncio.get_running_loop().create_future()

        def done(result: SigningKey | Refusal) -> None:
            # The connection may be closed by now.
            if not durable.done():
                durable.set_result(result)

        self._subscriptions.run(self._subscriptions.rotate_key, done)
        result = await durable
        if isinstance(result, Refusal):
            return ErrorAnswer(result.detail)
        return RotateAnswer(result.public.kid, result.active_from_ms)

    async def _confirm_expiry(self) -> ConfirmAnswer | ErrorAnswer:
        durable: asyncio.Future[int | Refusal] = asyncio.get_running_loop().create_future()

        def done(result: int | Refusal) -> None:
            if not durable.done():
                durable.set_result(result)

        self._engine.confirm_expiry(done)
        result = await durable
        return ErrorAnswer(result.detail) if isinstance(result, Refusal) else ConfirmAnswer(result)

    async def _stats(self) -> StatsAnswer:
        return StatsAnswer(
            self._mode,
            os.getpid(),
            await _contents(self._engine),
            self._engine.storage_usage().memory_bytes,
            dict(_parts(self._store)),
        )


async def open_control_socket(
    engine: Engine,
    store: Store,
    subscriptions: Subscriptions | None,
    settings: StorageSettings,
    pause: StorePause | None = None,
) -> ControlServer | None:
    """Open the control socket of a store that has a directory. Without `pause`, requests to pause are refused."""
    if settings.mode == "memory":
        return None
    control = ControlServer(engine, store, subscriptions, settings.data_dir, settings.mode, pause)
    await control.open()
    return control


def _parts(store: Store) -> Mapping[str, int]:
    return store.storage.parts() if isinstance(store.storage, JournaledStorage) else {}


async def _contents(engine: Engine) -> StreamStats:
    """Count the content of the streams, a few thousand in each iteration of the event loop."""
    streams = tuple(engine.catalog)
    payload_bytes = forks = deleted = 0
    snapshots: dict[int, int] = {}
    for start in range(0, len(streams), STREAMS_PER_SLICE):
        for stream in streams[start : start + STREAMS_PER_SLICE]:
            payload_bytes += _stored_bytes(stream)
            forks += stream.fork is not None
            deleted += stream.deleted
            if stream.durable_snapshot is not None and not stream.deleted:
                snapshots[stream.durable_snapshot.blob_id] = stream.durable_snapshot.size
        await asyncio.sleep(0)
    return StreamStats(
        streams=len(streams),
        forks=forks,
        deleted_streams=deleted,
        documents=len(engine.catalog.documents),
        payload_bytes=payload_bytes,
        snapshots=len(snapshots),
        snapshot_bytes=sum(snapshots.values()),
    )


def _stored_bytes(stream: LiveStream) -> int:
    return stream.durable_position - max(stream.base_position, stream.floor_position)
