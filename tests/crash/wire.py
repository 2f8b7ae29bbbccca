"""A small asyncio HTTP/1.1 client that separates the two failures a crash test must distinguish.

`NotSent` means that the server cannot have seen the request; `Lost` that it may have, with an unknown outcome.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 60.0


class NotSent(Exception):
    """There was no connection, so no part of the request was sent."""


class Refused(Exception):
    """The server answered a request for events with an error."""


class Lost(Exception):
    """The connection broke before the answer was complete."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def offset(self) -> str:
        return self.headers["stream-next-offset"]

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Event:
    kind: str
    data: str


class Client:
    """One connection at a time, opened when needed."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._host = host
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def request(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Reply:
        reader, writer = await self._connection()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                writer.write(_head(method, path, headers or {}, len(body)) + body)
                await writer.drain()
                status, found = await _read_head(reader)
                payload = await _read_body(reader, method, status, found)
        except (OSError, asyncio.IncompleteReadError, EOFError) as error:
            self.close()
            raise Lost(str(error)) from error
        except BaseException:
            self.close()
            raise
        if found.get("connection", "").lower() == "close":
            self.close()
        return Reply(status, found, payload)

    async def events(self, path: str) -> AsyncGenerator[Event, None]:
        """Server-sent events until the server or the connection ends. Raises `Lost` only before the first answer."""
        reader, writer = await self._connection()
        try:
            writer.write(_head("GET", path, {"Accept": "text/event-stream"}, 0))
            await writer.drain()
            async with asyncio.timeout(TIMEOUT_S):
                status, headers = await _read_head(reader)
                if status != 200:
                    body = await _read_body(reader, "GET", status, headers)
                    raise Refused(f"SSE on {path}: {status} {body!r}")
            kind = "message"
            lines: list[str] = []
            async for line in _lines(reader, chunked=headers.get("transfer-encoding") == "chunked"):
                if not line:
                    if lines:
                        yield Event(kind, "\n".join(lines))
                    kind, lines = "message", []
                elif line.startswith("event:"):
                    kind = line.removeprefix("event:").strip()
                elif line.startswith("data:"):
                    lines.append(line.removeprefix("data:"))
        except (OSError, asyncio.IncompleteReadError, EOFError) as error:
            raise Lost(str(error)) from error
        finally:
            self.close()

    def close(self) -> None:
        writer, self._reader, self._writer = self._writer, None, None
        if writer is not None:
            # Abort at once: a killed server sends nothing more.
            writer.transport.abort()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None or self._reader.at_eof():
            self.close()
            try:
                self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
            except OSError as error:
                raise NotSent(str(error)) from error
        return self._reader, self._writer


def _head(method: str, path: str, headers: Mapping[str, str], length: int) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if length or method in {"POST", "PUT"}:
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *rest = raw.decode("latin-1").split("\r\n")[:-2]
    headers = {}
    for line in rest:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return int(first.split(" ")[1]), headers


async def _read_body(reader: asyncio.StreamReader, method: str, status: int, headers: Mapping[str, str]) -> bytes:
    if method == "HEAD" or status in {204, 304}:
        return b""
    if headers.get("transfer-encoding") == "chunked":
        return b"".join([chunk async for chunk in _chunks(reader)])
    return await reader.readexactly(int(headers.get("content-length", "0")))


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        data = await reader.readexactly(size + 2)
        if not size:
            return
        yield data[:-2]


async def _lines(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[str]:
    rest = b""
    if chunked:
        async for chunk in _chunks(reader):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line.decode()
        return
    while data := await reader.read(65536):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode()
