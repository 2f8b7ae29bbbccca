"""Short helpers for buckets and their streams, and a multipart parser that is independent of our client.

Invariant: the parser accepts only the exact syntax of RFC 2046, and consumes the whole body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from tests.http.protocol import Stream

_BOUNDARY = re.compile(r"multipart/mixed; boundary=([A-Za-z0-9'()+_,./:=?-]{1,70})")


@dataclass(frozen=True, slots=True)
class MimePart:
    content_type: str
    body: bytes


class Bucket:
    """One bucket on a server."""

    def __init__(self, http: httpx.Client, bucket_id: str) -> None:
        self.http = http
        self.id = bucket_id
        self.path = f"/ds/{bucket_id}"

    def create(self) -> Bucket:
        response = self.http.put(self.path)
        assert response.status_code == 201, response.text
        return self

    def get(self) -> httpx.Response:
        return self.http.get(self.path)

    def count(self) -> int:
        response = self.get()
        assert response.status_code == 200, response.text
        found = response.json()["streams"]
        assert isinstance(found, int)
        return found

    def listing(self, **query: Any) -> httpx.Response:
        return self.http.get(f"{self.path}/streams", params=query)

    def ids(self, **query: Any) -> list[str]:
        response = self.listing(**query)
        assert response.status_code == 200, response.text
        return [entry["stream_id"] for entry in response.json()["streams"]]

    def delete(self) -> httpx.Response:
        return self.http.delete(self.path)

    def stream(self, stream_id: str, content_type: str = "text/plain") -> BucketStream:
        return BucketStream(self.http, self, stream_id, content_type)


class BucketStream(Stream):
    """One stream of a bucket."""

    def __init__(self, http: httpx.Client, bucket: Bucket, stream_id: str, content_type: str = "text/plain") -> None:
        super().__init__(http, stream_id, content_type)
        self.bucket = bucket
        self.path = f"{bucket.path}/{quote(stream_id, safe='')}"

    def create(self, content: bytes | str = b"", headers: Mapping[str, str] | None = None) -> BucketStream:
        super().create(content, headers)
        return self

    def put_snapshot(
        self, at: str, content: bytes | str = b"state", content_type: str | None = "text/plain"
    ) -> httpx.Response:
        headers = {"Content-Type": content_type} if content_type is not None else {}
        return self.http.put(f"{self.path}/snapshot/{quote(at, safe='')}", content=content, headers=headers)

    def publish(self, at: str, content: bytes | str = b"state", content_type: str | None = "text/plain") -> None:
        response = self.put_snapshot(at, content, content_type)
        assert response.status_code == 204, response.text

    def latest(self) -> httpx.Response:
        return self.http.get(f"{self.path}/snapshot")

    def snapshot(self, at: str) -> httpx.Response:
        return self.http.get(f"{self.path}/snapshot/{quote(at, safe='')}")

    def delete_snapshot(self, at: str) -> httpx.Response:
        return self.http.delete(f"{self.path}/snapshot/{quote(at, safe='')}")

    def bootstrap(self, **query: Any) -> httpx.Response:
        return self.http.get(f"{self.path}/bootstrap", params=query)

    def parts(self) -> list[MimePart]:
        response = self.bootstrap()
        assert response.status_code == 200, response.text
        return parts_of(response)


def parts_of(response: httpx.Response) -> list[MimePart]:
    """The parts of a multipart body, each with exactly one header."""
    found = _BOUNDARY.fullmatch(response.headers["content-type"])
    assert found is not None, response.headers["content-type"]
    delimiter = b"--" + found[1].encode()
    body = response.content
    assert body.startswith(delimiter + b"\r\n")
    assert body.endswith(b"\r\n" + delimiter + b"--\r\n")
    inner = body[len(delimiter) + 2 : -len(delimiter) - 6]
    parts = []
    for piece in inner.split(b"\r\n" + delimiter + b"\r\n"):
        assert found[1].encode() not in piece, "the boundary occurs within a part"
        head, separator, content = piece.partition(b"\r\n\r\n")
        assert separator, piece[:100]
        name, colon, value = head.partition(b": ")
        assert (name, colon) == (b"Content-Type", b": "), head
        assert b"\r\n" not in value
        parts.append(MimePart(value.decode("latin-1"), content))
    return parts
