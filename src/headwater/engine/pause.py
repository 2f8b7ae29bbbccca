"""Pause the server: close its store, so that a local command can work on the data directory.

The command sends a request over the control socket, gets the response when the store is closed, and ends the pause by
closing the connection, which also happens if it dies. Then the server opens the store again.
"""

from __future__ import annotations

import asyncio
import os

import msgspec


class PauseAnswer(msgspec.Struct, frozen=True):
    paused: bool
    pid: int


class StorePause:
    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Take over the connection of a command; False if another command has already requested a pause."""
        if self._connection is not None:
            return False
        self._connection = reader, writer
        self.requested.set()
        return True

    async def hold(self) -> None:
        """Respond to the command that the store is closed, and wait until it has finished."""
        assert self._connection is not None
        reader, writer = self._connection
        try:
            writer.write(msgspec.json.encode(PauseAnswer(True, os.getpid())) + b"\n")
            await reader.read()
        except OSError:
            pass  # The command has disconnected.
        finally:
            writer.close()
            self._connection = None
            self.requested.clear()
