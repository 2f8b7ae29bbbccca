"""A reader of server-sent events over a raw connection that parses according to the WHATWG standard.

Invariant: lines end at CR, LF or CRLF and nowhere else, one leading space of a value is dropped, and an event is
dispatched by a blank line only. Invalid UTF-8 becomes U+FFFD, as in a browser.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tests.http.raw import RawConnection, encode
from tests.serving import Server

_LINE = re.compile(rb"\r\n|\n|\r")
_WIRE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Event:
    kind: str
    data: str

    @property
    def control(self) -> dict[str, Any]:
        assert self.kind == "control", self
        fields: dict[str, Any] = json.loads(self.data)
        return fields

    @property
    def decoded(self) -> bytes:
        """The bytes of a base64 data event."""
        assert self.kind == "data", self
        return base64.b64decode(self.data.replace("\n", ""), validate=True)


class SseReader:
    """One SSE response. Iterate over its events; iteration ends with the response, which must end cleanly."""

    def __init__(
        self,
        server: Server,
        name: str,
        *,
        offset: str = "-1",
        since: str | None = None,
        query: str = "",
        headers: dict[str, str] | None = None,
        connection: RawConnection | None = None,
    ) -> None:
        self.connection = connection or RawConnection(server)
        # A stream name of the base surface, or the path of any stream.
        path = name if name.startswith("/") else f"/v1/stream/{name}"
        start = f"offset={offset}" if since is None else f"since={since}"
        self.connection.send(encode("GET", f"{path}?{start}&live=sse{query}", headers=headers))
        _, self.status, self.fields = self.connection.response_head()
        self.wire = b""
        """The first bytes of the response."""
        self._pieces = self.connection.body_pieces(self.fields)
        self._events = self._parse()

    def __enter__(self) -> SseReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.socket.close()

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def header(self, name: str) -> str | None:
        return dict(self.fields).get(name.lower())

    def next(self) -> Event:
        """Return the next event; an AssertionError if the response ends or there is none in time."""
        try:
            return next(self._events)
        except StopIteration:
            raise AssertionError("the response ended where an event was expected") from None
        except TimeoutError:
            raise AssertionError("no event in time") from None

    def pair(self) -> tuple[Event, dict[str, Any]]:
        """The next data event and the control event that follows it."""
        data = self.next()
        assert data.kind == "data", f"expected a data event, not {data}"
        return data, self.next().control

    def until_up_to_date(self) -> list[Event]:
        """Return all events up to the first control event with `upToDate`."""
        events = []
        while True:
            events.append(self.next())
            if events[-1].kind == "control" and events[-1].control.get("upToDate"):
                return events

    def ends(self) -> bool:
        """Whether the response ends here, cleanly, without another event."""
        return next(self._events, None) is None

    def _parse(self) -> Iterator[Event]:
        kind, pending = "", b""
        data: list[str] = []
        for piece in self._pieces:
            if len(self.wire) < _WIRE_BYTES:
                self.wire += piece
            pending += piece
            # A CR at the very end may be the first half of a CRLF: wait for the next byte.
            while (found := _LINE.search(pending)) and (found[0] != b"\r" or found.end() < len(pending)):
                line, pending = pending[: found.start()].decode("utf-8", "replace"), pending[found.end() :]
                if not line:
                    if data:
                        yield Event(kind, "\n".join(data))
                    kind, data = "", []
                    continue
                field, _, value = line.partition(":")
                value = value.removeprefix(" ")
                if field == "event":
                    kind = value
                elif field == "data":
                    data.append(value)
        assert not pending, f"the response ended inside of a line: {pending!r}"
        assert not data, f"the response ended inside of an event: {data!r}"
