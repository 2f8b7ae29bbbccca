"""Short helpers for protocol requests, for tests that do not depend on how they are sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from tests.offsets import offset_text
from tests.serving import Server

ZERO: str = offset_text(0, 0)


def offset(message_index: int, byte_position: int) -> str:
    """The token of the offset after `message_index` messages and `byte_position` stored bytes, in any incarnation."""
    return offset_text(message_index, byte_position)


def byte_position(token: str) -> int:
    return int(token.split("_")[1], 16)


def producer(identity: str, epoch: int | str, seq: int | str) -> dict[str, str]:
    return {"Producer-Id": identity, "Producer-Epoch": str(epoch), "Producer-Seq": str(seq)}


def assert_problem(response: httpx.Response, status: int, code: str) -> None:
    """Check that the answer is a problem document with this status and code, and a helpful sentence."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert set(problem) >= {"type", "title", "status", "detail", "code"}
    assert problem["status"] == status
    assert problem["code"] == code, problem
    assert len(problem["detail"]) > 10
    for leak in ("Traceback", "headwater/", ".py", " object at 0x"):
        assert leak not in response.text


class Stream:
    """One stream on a server, by name."""

    def __init__(self, http: httpx.Client, name: str, content_type: str = "text/plain") -> None:
        self.http = http
        self.name = name
        self.path = f"/v1/stream/{name}"
        self.content_type = content_type

    def put(self, content: bytes | str = b"", headers: Mapping[str, str] | None = None) -> httpx.Response:
        """PUT with the stream's content type unless `headers` has another one."""
        return self.http.put(self.path, content=content, headers=self._with_type(headers))

    def create(self, content: bytes | str = b"", headers: Mapping[str, str] | None = None) -> Stream:
        response = self.put(content, headers)
        assert response.status_code == 201, response.text
        return self

    def post(self, content: bytes | str = b"", headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self.http.post(self.path, content=content, headers=self._with_type(headers))

    def append(self, content: bytes | str, headers: Mapping[str, str] | None = None) -> str:
        """Append, and return the new tail."""
        response = self.post(content, headers)
        assert response.status_code in (200, 204), response.text
        return response.headers["stream-next-offset"]

    def close(self, content: bytes | str = b"", headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self.post(content, {"Stream-Closed": "true", **(headers or {})})

    def get(self, headers: Mapping[str, str] | None = None, **query: Any) -> httpx.Response:
        return self.http.get(self.path, params=query, headers=headers)

    def long_poll(self, at: str, **query: Any) -> httpx.Response:
        return self.get(offset=at, live="long-poll", **query)

    def head(self) -> httpx.Response:
        return self.http.head(self.path)

    def delete(self) -> httpx.Response:
        return self.http.delete(self.path)

    def tail(self) -> str:
        response = self.head()
        assert response.status_code == 200
        return response.headers["stream-next-offset"]

    def content(self) -> bytes:
        """Everything in the stream, read chunk by chunk."""
        pieces, at = [], "-1"
        while True:
            response = self.get(offset=at)
            assert response.status_code == 200, response.text
            pieces.append(response.content)
            at = response.headers["stream-next-offset"]
            if response.headers.get("stream-up-to-date") == "true":
                return b"".join(pieces)

    def exists(self) -> bool:
        status = self.head().status_code
        assert status in (200, 404)
        return status == 200

    def _with_type(self, headers: Mapping[str, str] | None) -> dict[str, str]:
        fields = {"Content-Type": self.content_type, **(headers or {})}
        # An empty value means that the header is not sent.
        return {name: value for name, value in fields.items() if not (name == "Content-Type" and not value)}


@contextmanager
def stream_on(server: Server, name: str, content_type: str = "text/plain") -> Iterator[Stream]:
    """A stream on the test's own server, not yet created."""
    # Without verification: loading certificates takes longer than the test, and this is plain HTTP.
    with httpx.Client(base_url=server.url, timeout=60, verify=False) as http:
        yield Stream(http, name, content_type)
