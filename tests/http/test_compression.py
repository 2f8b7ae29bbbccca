"""Catch-up reads are compressed for clients that accept it; nothing else is compressed."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator

import httpx
import pytest
import zstandard

from headwater.http.compression import CHUNK_MAX_BYTES, MIN_BYTES, accepted_coding, is_compressible
from tests.http.protocol import Stream, stream_on
from tests.http.raw import RawConnection, encode
from tests.http.sse_reader import SseReader
from tests.measured import cpu_s, least
from tests.serving import Server, serve

DECODERS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data),
    "gzip": gzip.decompress,
    "deflate": zlib.decompress,
}


def raw_body(stream: Stream, accept: str | None, **query: str) -> tuple[httpx.Response, bytes]:
    """Return the response and its undecoded body."""
    headers = {"Accept-Encoding": accept if accept is not None else "identity"}
    with stream.http.stream("GET", stream.path, params={"offset": "-1", **query}, headers=headers) as response:
        return response, b"".join(response.iter_raw())


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        ("", None),
        ("identity", None),
        ("br", None),
        ("gzip", "gzip"),
        ("x-gzip", "gzip"),
        ("deflate", "deflate"),
        ("deflate, gzip", "gzip"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("gzip;q=1.0, zstd;q=0.5", "gzip"),
        ("zstd;q=0, gzip;q=0, deflate", "deflate"),
        ("*", "zstd"),
        ("*;q=0.1, gzip;q=0.2", "gzip"),
        ("gzip;q=0.5, identity;q=1", None),
        ("gzip;q=0", None),
        ("GZIP ; Q=0.3", "gzip"),
        ("gzip;q=2, deflate", "deflate"),
    ],
)
def test_coding_follows_the_weights_of_the_client(header: str, coding: str | None) -> None:
    assert accepted_coding(header.encode()) == coding


@pytest.mark.parametrize(
    "header",
    ["gzip" + " " * 30_000 + "!", "gzip, " * 5_000, "gzip;q=" + "0" * 30_000, "gzip" + " " * 900 + "!"],
    ids=["spaces", "items", "digits", "short"],
)
def test_malformed_header_is_refused_without_a_long_search(header: str) -> None:
    """An ambiguous pattern takes time with the square of the length: 7 s of the event loop for 30 kB."""
    assert accepted_coding(header.encode()) is None
    assert least(lambda: cpu_s(lambda: accepted_coding(header.encode())), 0.05) < 0.05


def test_only_types_that_get_smaller_are_compressed() -> None:
    for media in ("application/json", "text/plain", "text/html", "application/ld+json", "application/x-ndjson"):
        assert is_compressible(media), media
    for media in ("application/octet-stream", "image/png", "text/event-stream", "application/zip", "video/mp4"):
        assert not is_compressible(media), media


@pytest.mark.parametrize("coding", list(DECODERS))
def test_catch_up_read_is_compressed_and_complete(json_stream: Stream, coding: str) -> None:
    values = [{"number": number, "text": "the same words again"} for number in range(500)]
    json_stream.create(json.dumps(values))
    response, body = raw_body(json_stream, coding)
    assert response.headers["content-encoding"] == coding
    assert response.headers.get_list("vary") == ["Origin, Accept-Encoding"], "one line"
    assert len(body) == int(response.headers["content-length"]) < 5_000
    assert json.loads(DECODERS[coding](body)) == values
    plain, plain_body = raw_body(json_stream, None)
    assert json.loads(plain_body) == values
    assert "content-encoding" not in plain.headers
    assert plain.headers.get_list("vary") == ["Origin, Accept-Encoding"]
    assert plain.headers["stream-next-offset"] == response.headers["stream-next-offset"]


def test_every_coding_has_its_own_etag(stream: Stream) -> None:
    stream.create("x" * 5_000)
    tags = {raw_body(stream, coding)[0].headers["etag"] for coding in (None, *DECODERS)}
    assert len(tags) == 4
    tag = raw_body(stream, "gzip")[0].headers["etag"]
    headers = {"Accept-Encoding": "gzip", "If-None-Match": tag}
    assert stream.get(headers=headers, offset="-1").status_code == 304
    assert stream.get(headers={**headers, "Accept-Encoding": "zstd"}, offset="-1").status_code == 200


def test_short_bodies_and_other_types_stay_plain(client: httpx.Client, stream: Stream) -> None:
    stream.create("x" * (MIN_BYTES - 1))
    response, _ = raw_body(stream, "gzip")
    assert "content-encoding" not in response.headers
    assert response.headers.get_list("vary") == ["Origin"]
    stream.append("x")
    assert raw_body(stream, "gzip")[0].headers["content-encoding"] == "gzip"
    binary = Stream(client, f"{stream.name}-binary", "application/octet-stream").create(b"\x00" * 10_000)
    assert "content-encoding" not in raw_body(binary, "gzip")[0].headers


def test_long_stream_is_read_in_compressed_chunks(stream: Stream) -> None:
    message = "0123456789abcdef" * 20_000
    stream.create()
    for _ in range(8):
        stream.append(message)
    found, at = b"", "-1"
    while True:
        response, body = raw_body(stream, "zstd", offset=at)
        assert response.headers["content-encoding"] == "zstd"
        plain = DECODERS["zstd"](body)
        assert len(plain) <= CHUNK_MAX_BYTES
        found += plain
        at = response.headers["stream-next-offset"]
        if "stream-up-to-date" in response.headers:
            break
    assert found == message.encode() * 8


def test_message_larger_than_a_chunk_is_not_compressed(stream: Stream) -> None:
    stream.create("x" * (CHUNK_MAX_BYTES + 1))
    response, body = raw_body(stream, "gzip")
    assert "content-encoding" not in response.headers
    assert len(body) == CHUNK_MAX_BYTES + 1


def test_chunk_with_many_readers_is_compressed_once(stream: Stream, server: Server) -> None:
    stream.create("abcdefgh" * 20_000)
    before = compressed_count(stream.http)
    connections = [RawConnection(server) for _ in range(10)]
    try:
        for connection in connections:
            connection.send(encode("GET", f"{stream.path}?offset=-1", headers={"Accept-Encoding": "zstd"}))
        bodies = {b"".join(connection.body_pieces(connection.response_head()[2])) for connection in connections}
    finally:
        for connection in connections:
            connection.socket.close()
    assert len(bodies) == 1
    assert compressed_count(stream.http) == before + 1


def compressed_count(http: httpx.Client) -> int:
    for line in http.get("/metrics").text.splitlines():
        if line.startswith("headwater_chunks_compressed_total"):
            return int(float(line.split()[1]))
    raise AssertionError("there is no such metric")


@pytest.fixture(scope="module")
def compressing() -> Iterator[Server]:
    with serve(DS_HTTP__COMPRESS_EVENTS="true") as running:
        yield running


@pytest.mark.parametrize("coding", list(DECODERS))
def test_events_are_compressed_only_by_setting(
    compressing: Server, server: Server, stream_name: Callable[[], str], coding: str
) -> None:
    name = stream_name()
    for running, is_compressed in ((server, False), (compressing, True)):
        with stream_on(running, name) as stream:
            stream.create("hello")
            stream.close("last")
            with SseReader(running, name, headers={"Accept-Encoding": coding}) as events:
                assert (events.header("content-encoding") == coding) is is_compressed
                if is_compressed:
                    body = DECODERS[coding](b"".join(events.connection.body_pieces(events.fields)))
                    assert b"data:hello" in body
                    assert b'"streamClosed":true' in body
                else:
                    assert events.next().data == "hello"


def test_compression_can_be_disabled(stream_name: Callable[[], str]) -> None:
    with serve(DS_HTTP__COMPRESSION="false") as running, stream_on(running, stream_name()) as stream:
        stream.create("x" * 5_000)
        response, body = raw_body(stream, "gzip")
        assert "content-encoding" not in response.headers
        assert len(body) == 5_000
