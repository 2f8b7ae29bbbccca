"""Errors of servers and gateways: messages name the stream and the offset, and say what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from headwater.spark.errors import DataGoneError, ServerRefusedError, ServerUnreachableError, StreamMissingError
from headwater.spark.options import ConnectionOptions
from headwater.spark.protocol import Producer, StreamsClient
from tests.http_handlers import HandlerServer, QuietHandler
from tests.serving import serve
from tests.spark.streams import Streams


def test_errors_name_the_stream_and_what_to_do(streams: Streams, stream_name: Callable[[], str]) -> None:
    client = StreamsClient(ConnectionOptions(streams.root, retry_timeout_s=60.0))
    with pytest.raises(
        StreamMissingError, match=r"'nowhere' at .*/v1/stream: there is no such stream .* onGone=restart"
    ):
        client.head("nowhere")
    server = streams.root.removesuffix("/v1/stream")
    with pytest.raises(StreamMissingError, match=f"url must be the stream root, usually {server}/v1/stream"):
        StreamsClient(ConnectionOptions(server, retry_timeout_s=60.0)).head("nowhere")
    name = streams.filled(stream_name(), [1, 2, 3])
    beyond = "0000000000000009_0000000000000009"
    with pytest.raises(ServerRefusedError, match=rf"'{name}' at .*, offset {beyond}: 400.* the stream was recreated"):
        client.read(name, beyond)
    with pytest.raises(StreamMissingError, match=rf"'nowhere' at .*, offset {beyond}: there is no such stream"):
        client.read("nowhere", beyond)
    streams.create(name + "-text", "text/plain")
    with pytest.raises(ServerRefusedError, match=rf"'{name}-text' at .*: 409.* set contentType to that of the stream"):
        client.append(name + "-text", b"[1]", "application/json", Producer("p", 0, 0))
    client.close(name)
    with pytest.raises(ServerRefusedError, match=rf"'{name}' at .*: 409.* The stream is closed"):
        client.append(name, b"[4]", "application/json", Producer("p", 0, 0))


class Gateway(QuietHandler):
    """A gateway that requires a token, and returns 503 for the first two requests that have one."""

    busy = 2

    def do_HEAD(self) -> None:
        if self.headers.get("Authorization") != "Bearer right":
            self.send_response(401 if "Authorization" not in self.headers else 403)
        elif Gateway.busy:
            Gateway.busy -= 1
            self.send_response(503)
            self.send_header("Retry-After", "0")
        else:
            self.send_response(200)
            self.send_header("Stream-Next-Offset", "7")
        self.end_headers()


def test_tokens_and_busy_gateways(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("wrong\n")
    with HandlerServer(Gateway).running() as gateway:
        root = f"{gateway.url}/v1/stream"
        client = StreamsClient(ConnectionOptions(root, token_file=str(token_file)))
        with pytest.raises(ServerRefusedError, match=r"'a' at .*: 401, .* Set token or tokenFile"):
            StreamsClient(ConnectionOptions(root)).head("a")
        with pytest.raises(ServerRefusedError, match=r"'a' at .*: 403, .* The token does not allow this"):
            client.head("a")
        token_file.write_text("right\n")
        os.utime(token_file, ns=(1, 1))
        assert client.head("a").offset == "7", "the token file was read again, and the request retried"
        assert Gateway.busy == 0


def test_unavailable_server_is_retried_and_then_reported() -> None:
    client = StreamsClient(ConnectionOptions("http://127.0.0.1:9/v1/stream", retry_timeout_s=0.3))
    with pytest.raises(
        ServerUnreachableError, match=r"HEAD stream 'a' .* \(retryTimeout\).* Check that the server runs"
    ):
        client.head("a")


def test_error_for_removed_data_has_the_earliest_offset() -> None:
    with serve() as server, httpx.Client(base_url=server.url) as http:
        http.put("/ds/bucket").raise_for_status()
        bucket = Streams(f"{server.url}/ds/bucket", http)
        name = bucket.filled("trimmed", [1, 2, 3])
        offset = bucket.tail(name)
        bucket.append(name, [4])
        http.put(f"/ds/bucket/{name}/snapshot/{offset}", content=b"six").raise_for_status()
        client = StreamsClient(ConnectionOptions(f"{server.url}/v1/stream", bucket="bucket"))
        with pytest.raises(DataGoneError, match=rf"'{name}' at .*, offset -1: .* onGone=bootstrap") as caught:
            client.splits(name, "-1", bucket.tail(name), 1)
        assert caught.value.earliest == offset
        assert client.head(name).snapshot == offset
        assert client.snapshot(name, offset).body == b"six"
        assert client.listing("tri") == [name]
