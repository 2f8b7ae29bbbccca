"""Large snapshots whose stream another worker owns: their bodies are forwarded while they are received."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import httpx
import pytest

from headwater.cluster.shards import ShardMap
from tests.http.bucketed import Bucket, BucketStream
from tests.http.protocol import offset
from tests.http.raw import connect, encode
from tests.serving import Server, serve

LARGE = bytes(range(256)) * 1100
"""Too large to be relayed with its request."""
TEXT = {"Content-Type": "text/plain"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(DS_SERVER__WORKERS="2") as running:
        yield running


def _streams(http: httpx.Client, prefix: str) -> Iterator[BucketStream]:
    """An empty stream of each worker. Each connection is at one of them, so most of several cases are relayed."""
    for worker in range(2):
        names = (f"{prefix}{number}" for number in itertools.count())
        name = next(name for name in names if ShardMap(16, 2).owner_of_bucket(name) == worker)
        yield Bucket(http, name).create().stream("log").create()


@pytest.mark.parametrize("is_chunked", [False, True])
def test_pipelined_snapshot_is_published_after_the_append_before_it(server: Server, is_chunked: bool) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for stream in _streams(http, f"pipelined-{is_chunked}-".lower()):
            path = stream.path
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(LARGE), LARGE) if is_chunked else LARGE
            length = {"Transfer-Encoding": "chunked"} if is_chunked else {"Content-Length": str(len(LARGE))}
            for number in range(1, 6):
                at = offset(number, 4 * number)
                with connect(server) as connection:
                    connection.send(
                        encode("POST", path, headers=TEXT, body=b"four")
                        + encode("PUT", f"{path}/snapshot/{at}", headers=length)
                        + body
                        + encode("GET", f"{path}/snapshot/{at}")
                    )
                    assert [connection.response().status for _ in range(2)] == [204, 204]
                    assert connection.response().body == LARGE


@pytest.mark.parametrize("headers", [{}, {"Expect": "100-continue"}], ids=["sends", "waits"])
def test_snapshot_is_accepted_or_refused_before_its_body_is_sent(server: Server, headers: dict[str, str]) -> None:
    length = {"Content-Length": str(len(LARGE))}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for stream in _streams(http, f"early-{len(headers)}-"):
            for _ in range(5):
                with connect(server) as connection:
                    connection.send(encode("PUT", f"{stream.path}/snapshot/{offset(9, 99)}", headers=length | headers))
                    refused = connection.response()
                    assert (refused.status, refused.header("connection")) == (409, "close")
                    assert b"after the end of the stream" in refused.body
                with connect(server) as connection:
                    path = f"{stream.path}/snapshot/{offset(0, 0)}"
                    connection.send(encode("PUT", path, headers=length | headers))
                    if headers:
                        assert connection.response().status == 100
                    connection.send(LARGE)
                    assert connection.response().status == 204
                    assert connection.request("GET", path).body == LARGE
