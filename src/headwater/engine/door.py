"""The control door of a running server: questions from the same machine, over a socket in the data directory.

One JSON object a line, each answered by one:

    {"ask": "stats"}   what the store holds
    {"ask": "hold"}    keep every file of the store until this connection ends: somebody copies the directory
    {"ask": "rotate"}  make a new key that webhooks are signed with
    {"ask": "confirm-expiry"}  delete the expired streams that are kept after a clock jump

A hold costs the server nothing but the files that it would have removed meanwhile; whoever copies does so in a process
of its own, and a copier that dies lets go by dying.
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
from headwater.engine.stores import Store
from headwater.engine.stream import LiveStream
from headwater.engine.subscriptions import Subscriptions
from headwater.storage import control_socket
from headwater.storage.journaled_store import FileStorage
from headwater.storage.stats import StreamStats

if TYPE_CHECKING:
    from headwater.config import Storage as StorageSettings

log = logging.getLogger("headwater.engine")

COUNTED_AT_ONCE: Final = 5000
"""Streams that are counted before others have a turn: about a millisecond."""


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ask: Literal["stats", "hold", "rotate", "confirm-expiry"]


class Held(msgspec.Struct, frozen=True):
    held: bool
    mode: str
    pid: int


class Told(msgspec.Struct, frozen=True):
    mode: str
    pid: int
    contents: StreamStats
    memory_bytes: int
    """Message bytes held in memory for the modes that write them to files later."""
    parts: dict[str, int]


class Rotated(msgspec.Struct, frozen=True):
    kid: str
    signs_from_ms: int


class Confirmed(msgspec.Struct, frozen=True):
    released: int
    """Expired streams that are deleted now."""


class Trouble(msgspec.Struct, frozen=True):
    error: str


class Door:
    def __init__(
        self, engine: Engine, store: Store, subscriptions: Subscriptions | None, directory: Path, mode: str
    ) -> None:
        self._engine = engine
        self._store = store
        self._subscriptions = subscriptions
        self._directory = directory
        self._mode = mode
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Begin to listen. A directory that can have no socket costs the commands that need it, not the server."""
        try:
            listening = control_socket.listening_socket(self._directory)
        except OSError as error:
            log.warning("no control socket in %s, so no backup while the server runs: %s", self._directory, error)
            return
        self._server = await asyncio.start_unix_server(self._met, sock=listening, limit=control_socket.LINE_MAX_BYTES)

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        control_socket.remove(self._directory)
        for talk in tuple(self._talks):
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = asyncio.get_running_loop().create_task(self._talk(reader, writer))
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        holds = 0
        try:
            while line := await reader.readline():
                try:
                    ask = msgspec.json.decode(line, type=Ask).ask
                except msgspec.MsgspecError as error:
                    answer: msgspec.Struct = Trouble(f"This cannot be asked: {error}")
                else:
                    if ask == "hold":
                        self._store.files.hold()
                        holds += 1
                        answer = Held(True, self._mode, os.getpid())
                    elif ask == "rotate":
                        answer = await self._rotate()
                    elif ask == "confirm-expiry":
                        answer = await self._confirm_expiry()
                    else:
                        answer = await self._stats()
                writer.write(msgspec.json.encode(answer) + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):
            # It hung up, or sent a line that does not end.
            pass
        finally:
            for _ in range(holds):
                await asyncio.shield(asyncio.to_thread(self._store.files.release))
            with suppress(OSError):
                writer.close()

    async def _rotate(self) -> Rotated | Trouble:
        if self._subscriptions is None:
            return Trouble("this server has no subscriptions, so nothing is signed")
        durable: asyncio.Future[SigningKey | Refusal] = asyncio.get_running_loop().create_future()

        def done(result: SigningKey | Refusal) -> None:
            # The door may have closed meanwhile.
            if not durable.done():
                durable.set_result(result)

        self._subscriptions.answer(self._subscriptions.rotate_key, done)
        result = await durable
        if isinstance(result, Refusal):
            return Trouble(result.detail)
        return Rotated(result.public.kid, result.active_from_ms)

    async def _confirm_expiry(self) -> Confirmed | Trouble:
        durable: asyncio.Future[int | Refusal] = asyncio.get_running_loop().create_future()

        def done(result: int | Refusal) -> None:
            if not durable.done():
                durable.set_result(result)

        self._engine.confirm_expiry(done)
        result = await durable
        return Trouble(result.detail) if isinstance(result, Refusal) else Confirmed(result)

    async def _stats(self) -> Told:
        return Told(
            self._mode,
            os.getpid(),
            await _contents(self._engine),
            self._engine.storage_usage().memory_bytes,
            dict(_parts(self._store)),
        )


async def open_door(
    engine: Engine, store: Store, subscriptions: Subscriptions | None, settings: StorageSettings
) -> Door | None:
    """The door of a store that has a directory, open."""
    if settings.mode == "memory":
        return None
    door = Door(engine, store, subscriptions, settings.data_dir, settings.mode)
    await door.open()
    return door


def _parts(store: Store) -> Mapping[str, int]:
    storage = store.storage
    if not isinstance(storage, FileStorage):
        # An `acid` store can be looked at from outside.
        return {}
    found = storage.stats()
    return {
        "segments": found.segments,
        "packs": found.packs,
        "live_bytes": found.live_bytes,
        "dead_bytes": found.dead_bytes,
    }


async def _contents(engine: Engine) -> StreamStats:
    """What the streams come to, counted a few at a time while others go on."""
    streams = tuple(engine.catalog)
    payload_bytes = forks = deleted = 0
    snapshots: dict[int, int] = {}
    for start in range(0, len(streams), COUNTED_AT_ONCE):
        for stream in streams[start : start + COUNTED_AT_ONCE]:
            payload_bytes += _kept_bytes(stream)
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


def _kept_bytes(stream: LiveStream) -> int:
    return stream.durable_position - max(stream.base_position, stream.floor_position)
