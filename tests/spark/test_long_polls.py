"""Waiting for changes of many streams: which are reported, how soon, and while a server is unavailable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from headwater.spark import long_polls
from headwater.spark.long_polls import LongPolls
from headwater.spark.options import ConnectionOptions
from headwater.spark.protocol import StreamsClient
from tests.ports import free_port
from tests.serving import serve
from tests.spark.streams import Streams


def watch_of(streams: Streams) -> LongPolls:
    connection = ConnectionOptions(streams.root)
    return LongPolls(StreamsClient(connection), connection)


def test_changed_stream_is_reported_immediately(streams: Streams, stream_name: Callable[[], str]) -> None:
    names = [streams.create(stream_name()) for _ in range(20)]
    watch = watch_of(streams)
    try:
        watch.open_polls({name: streams.tail(name) for name in names})
        assert watch.take(0.2) == set()
        streams.append(names[7], [1])
        assert watch.take(60.0) == {names[7]}
        # Reported once; a new poll starts at the given offset.
        watch.open_polls({names[7]: streams.tail(names[7])})
        assert watch.take(0.2) == set()
    finally:
        watch.close()


def test_change_before_the_poll_is_reported(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = streams.create(stream_name())
    before = streams.tail(name)
    streams.append(name, [1])
    watch = watch_of(streams)
    try:
        watch.open_polls({name: before})
        assert watch.take(60.0) == {name}
    finally:
        watch.close()


def test_a_poll_that_times_out_is_sent_again(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = streams.create(stream_name())
    watch = watch_of(streams)
    try:
        watch.open_polls({name: streams.tail(name)})
        # The server returns 204 after two seconds.
        assert watch.take(3.0) == set()
        streams.append(name, [1])
        assert watch.take(60.0) == {name}
    finally:
        watch.close()


def test_deletion_is_reported(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = streams.create(stream_name())
    watch = watch_of(streams)
    try:
        watch.open_polls({name: streams.tail(name)})
        assert watch.take(0.1) == set()
        streams.delete(name)
        assert watch.take(60.0) == {name}
    finally:
        watch.close()


def test_streams_beyond_the_limit_are_checked_in_turns(
    streams: Streams, stream_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_polls, "POLLS_MAX", 2)
    names = [streams.create(stream_name()) for _ in range(5)]
    watch = watch_of(streams)
    try:
        watch.open_polls({name: streams.tail(name) for name in names})
        assert watch.take(60.0) == set(names[2:])
    finally:
        watch.close()


def test_changes_are_reported_after_a_server_restart(tmp_path: Path) -> None:
    settings = {"DS_STORAGE__MODE": "file-durable", "DS_STORAGE__DATA_DIR": "data"}
    with httpx.Client(timeout=60) as http:
        port = free_port()
        with serve(directory=tmp_path, port=port, **settings) as server:  # type: ignore[arg-type]
            streams = Streams(f"{server.url}/v1/stream", http)
            name = streams.create("restarted")
            tail = streams.tail(name)
            watch = watch_of(streams)
            watch.open_polls({name: tail})
            assert watch.take(0.1) == set()
            server.kill()
        try:
            with serve(directory=tmp_path, port=port, **settings):  # type: ignore[arg-type]
                streams.append(name, [1])
                assert watch.take(60.0) == {name}
        finally:
            watch.close()
