"""Requests whose headers the server knows from earlier ones get the same responses as those that it parses.

Each test sends complete requests one after the other over one connection, as most clients do: from the second one on,
the server takes the path for known heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http.protocol import Stream, producer
from tests.http.raw import RawConnection, RawResponse, connect
from tests.serving import Server

TEXT = {"Content-Type": "text/plain"}


@pytest.fixture
def connection(server: Server) -> Iterator[RawConnection]:
    with connect(server) as opened:
        yield opened


def send(connection: RawConnection, path: str, body: bytes, headers: dict[str, str] | None = None) -> RawResponse:
    return connection.request("POST", path, headers={**TEXT, **(headers or {})}, body=body)


def facts(response: RawResponse) -> tuple[object, ...]:
    names = ("producer-epoch", "producer-seq", "producer-expected-seq", "producer-received-seq")
    return response.status, *(response.header(name) for name in names)


def created(connection: RawConnection, stream: Stream, count: int) -> list[str]:
    paths = [f"{stream.path}-{number}" for number in range(count)]
    for path in paths:
        assert connection.request("PUT", path, headers=TEXT).status == 201
    return paths


def test_each_append_goes_to_the_stream_in_its_request_line(connection: RawConnection, stream: Stream) -> None:
    paths = created(connection, stream, 5)
    for turn in range(4):
        for path in paths:
            appended = send(connection, path, f"<{turn}{path[-1]}>".encode())
            offset = appended.header("stream-next-offset")
            assert appended.status == 204
            assert offset is not None
            assert offset.startswith(f"{turn + 1:016x}_{4 * (turn + 1):016x}_")
    for path in paths:
        read = connection.request("GET", f"{path}?offset=-1")
        assert read.body == b"".join(f"<{turn}{path[-1]}>".encode() for turn in range(4))


def test_producers_are_exactly_once_on_many_streams(connection: RawConnection, stream: Stream) -> None:
    paths = created(connection, stream, 3)
    for seq in range(4):
        for path in paths:
            body = f"{seq}{path[-1]}".encode()
            assert facts(send(connection, path, body, producer("p", 0, seq))) == (200, "0", str(seq), None, None)
            assert facts(send(connection, path, body, producer("p", 0, seq))) == (204, "0", str(seq), None, None)
            assert facts(send(connection, path, body, producer("q", 7, seq)))[:3] == (200, "7", str(seq))
    path = paths[0]
    assert facts(send(connection, path, b"xx", producer("p", 0, 9))) == (409, None, None, "4", "9")
    assert facts(send(connection, path, b"xx", producer("q", 6, 4)))[:2] == (403, "7")
    assert facts(send(connection, path, b"xx", producer("p", 0, 1)))[:3] == (204, "0", "3")
    for path in paths:
        read = connection.request("GET", f"{path}?offset=-1")
        assert read.body == b"".join(f"{seq}{path[-1]}".encode() * 2 for seq in range(4))


@pytest.mark.parametrize("headers", [{}, producer("p", 0, 1)], ids=["plain", "producer"])
def test_refusals_are_those_of_parsed_requests(
    connection: RawConnection, stream: Stream, headers: dict[str, str]
) -> None:
    usual, missing, closed, other = created(connection, stream, 4)
    assert connection.request("DELETE", missing).status == 204
    assert connection.request("DELETE", other).status == 204
    assert connection.request("PUT", other, headers={"Content-Type": "application/json"}).status == 201
    first = producer("p", 0, 0) if headers else {}
    for path in (usual, closed):
        send(connection, path, b"ab", first)
    assert connection.request("POST", closed, headers={"Stream-Closed": "true"}).status == 204
    assert send(connection, usual, b"ab", headers).status in (200, 204)
    assert send(connection, missing, b"ab", headers).status == 404
    assert send(connection, other, b"ab", headers).status == 409
    refused = send(connection, closed, b"ab", headers)
    assert (refused.status, refused.header("stream-closed")) == (409, "true")
    assert connection.request("PUT", missing, headers=TEXT).status == 201
    assert send(connection, missing, b"ab", first).status in (200, 204)
    assert send(connection, f"{usual}//x", b"ab", headers).status == 400
    assert send(connection, usual.replace("/v1/stream/", "/v1/stream//"), b"ab", headers).status == 400


def test_a_new_incarnation_gets_the_appends(connection: RawConnection, stream: Stream) -> None:
    (path,) = created(connection, stream, 1)
    for _ in range(3):
        assert send(connection, path, b"ab").status == 204
    before = connection.request("HEAD", path).header("stream-next-offset")
    assert connection.request("DELETE", path).status == 204
    assert send(connection, path, b"ab").status == 404
    assert connection.request("PUT", path, headers=TEXT).status == 201
    appended = send(connection, path, b"ab").header("stream-next-offset")
    assert before is not None
    assert appended is not None
    assert (appended[:33], appended[34:] != before[34:]) == (f"{1:016x}_{2:016x}", True)
