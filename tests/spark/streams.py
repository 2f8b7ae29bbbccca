"""Create and read streams over plain HTTP, so that tests check the connector by what a client sees."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import httpx

from tests.serving import Server, serve

JSON = "application/json"


ROOMY = {
    "DS_STORAGE__MODE": "memory",
    "DS_REGISTRY__ENABLED": "true",
    "DS_LIMITS__MAX_STREAM_BYTES": "0",
    "DS_LIMITS__MAX_MEMORY_BYTES": str(2**30),
    "DS_SERVER__LONG_POLL_TIMEOUT_SECS": "2",
}
"""The settings of a server with a registry and without the size limits of memory mode."""


def roomy() -> AbstractContextManager[Server]:
    return serve(**ROOMY)  # type: ignore[arg-type]


class Streams:
    """Streams below one root."""

    def __init__(self, root: str, http: httpx.Client) -> None:
        self.root = root
        self.http = http

    def create(self, name: str, content_type: str = JSON) -> str:
        self.http.put(f"{self.root}/{name}", headers={"Content-Type": content_type}).raise_for_status()
        return name

    def append(self, name: str, messages: Sequence[Any]) -> str:
        """Append JSON messages in one request; return the offset after them."""
        body = json.dumps(messages, separators=(",", ":")).encode()
        return self.append_bytes(name, body, JSON)

    def append_bytes(self, name: str, body: bytes, content_type: str) -> str:
        answer = self.http.post(f"{self.root}/{name}", content=body, headers={"Content-Type": content_type})
        answer.raise_for_status()
        return answer.headers["Stream-Next-Offset"]

    def filled(self, name: str, messages: Iterable[Any], per_append: int = 1000) -> str:
        """Create a JSON stream with these messages."""
        self.create(name)
        waiting = list(messages)
        for at in range(0, len(waiting), per_append):
            self.append(name, waiting[at : at + per_append])
        return name

    def raw(self, name: str) -> list[bytes]:
        """Every message of a JSON stream, byte for byte."""
        import msgspec

        found: list[bytes] = []
        offset = "-1"
        while True:
            answer = self.http.get(f"{self.root}/{name}", params={"offset": offset})
            answer.raise_for_status()
            found += [bytes(one) for one in msgspec.json.decode(answer.content, type=list[msgspec.Raw])]
            offset = answer.headers["Stream-Next-Offset"]
            if answer.headers.get("Stream-Up-To-Date") == "true":
                return found

    def messages(self, name: str) -> list[Any]:
        return [json.loads(one) for one in self.raw(name)]

    def content(self, name: str) -> bytes:
        """The bytes of a small stream of another type."""
        answer = self.http.get(f"{self.root}/{name}", params={"offset": "-1"})
        answer.raise_for_status()
        return answer.content

    def tail(self, name: str) -> str:
        answer = self.http.head(f"{self.root}/{name}")
        answer.raise_for_status()
        return answer.headers["Stream-Next-Offset"]

    def exists(self, name: str) -> bool:
        return self.http.head(f"{self.root}/{name}").status_code == 200

    def is_closed(self, name: str) -> bool:
        closed: str | None = self.http.head(f"{self.root}/{name}").headers.get("Stream-Closed")
        return closed == "true"

    def delete(self, name: str) -> None:
        self.http.delete(f"{self.root}/{name}").raise_for_status()
