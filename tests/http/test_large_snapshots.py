"""Large snapshots are published, read and bootstrapped without being held in the server's memory."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from headwater.client import Stream
from tests.http.bucketed import Bucket
from tests.http.protocol import offset
from tests.serving import Server, serve

OCTETS = "application/octet-stream"
PIECE = bytes(range(256)) * 1024
GROWTH_MAX = 32 * 1024 * 1024


class Watcher:
    """Records the largest resident size of a process while a block runs."""

    def __init__(self, server: Server) -> None:
        self._process = psutil.Process(server.pid)
        self.before = self.largest = self._process.memory_info().rss
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self.largest - self.before

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self.largest = max(self.largest, self._process.memory_info().rss)


def content(megabytes: int) -> Iterator[bytes]:
    """Generate content in which no two megabytes are equal."""
    for number in range(megabytes * 4):
        yield number.to_bytes(8, "big") + PIECE[8:]


def checksum(pieces: Iterator[bytes]) -> tuple[int, int]:
    crc = size = 0
    for piece in pieces:
        crc, size = zlib.crc32(piece, crc), size + len(piece)
    return crc, size


def warm_up(bucket: Bucket) -> None:
    """Run every operation once at a small size, so that lazy imports and caches are loaded."""
    stream = bucket.stream("warm", OCTETS).create(b"x" * 1_000_000)
    for _ in range(3):
        stream.publish(stream.append(b"x" * 300_000), PIECE * 8)
        stream.append(b"x" * 300_000)
        assert len(stream.parts()) == 2
    stream.delete()


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_200_mb_are_published_read_and_bootstrapped_in_bounded_memory(tmp_path: Path, mode: str) -> None:
    megabytes = 200
    expected = checksum(content(megabytes))
    with (
        serve(directory=tmp_path, DS_STORAGE__MODE=mode) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        bucket = Bucket(http, "large").create()
        warm_up(bucket)
        stream = bucket.stream("large", OCTETS).create(b"folded")
        updates = [bytes([number]) * 100_000 for number in range(20)]
        for update in updates:
            stream.append(update)
        client = Stream(f"{server.url}{stream.path}", timeout_s=120)
        at = offset(1, 6)
        with Watcher(server) as watcher:
            client.publish_snapshot(at, content(megabytes), OCTETS)
            published = watcher.growth
            with http.stream("GET", f"{stream.path}/snapshot/{at}") as response:
                assert checksum(response.iter_raw()) == expected
            read = watcher.growth
            with client.bootstrap() as bootstrap:
                assert checksum(next(bootstrap.parts).chunks()) == expected
                assert [part.read() for part in bootstrap.parts] == updates
            # The same with a Content-Length, as most clients send it.
            headers = {"Content-Length": str(expected[1])}
            http.put(f"{stream.path}/snapshot/{at}", content=content(megabytes), headers=headers).raise_for_status()
        assert watcher.growth < GROWTH_MAX, (published, read, watcher.growth)


def test_appends_continue_while_200_mb_are_published(tmp_path: Path, long: bool) -> None:
    """Appends are answered during the upload, and the slowest takes far less time than the upload and its sync."""
    appended, slowest_s, answered = 0, 0.0, threading.Semaphore(0)

    def paced() -> Iterator[bytes]:
        for number, piece in enumerate(content(200)):
            # The rest is sent after an append was answered.
            assert number % 32 or answered.acquire(timeout=60), "no append is answered during the upload"
            yield piece

    with (
        serve(directory=tmp_path, DS_STORAGE__MODE="file-durable") as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        bucket = Bucket(http, "large").create()
        stream = bucket.stream("busy", OCTETS).create(b"folded")
        upload = threading.Thread(
            target=Stream(f"{server.url}{stream.path}", timeout_s=120).publish_snapshot,
            args=(offset(1, 6), paced(), OCTETS),
        )
        started = time.perf_counter()
        upload.start()
        while upload.is_alive():
            before = time.perf_counter()
            stream.append(b"x")
            slowest_s = max(slowest_s, time.perf_counter() - before)
            appended += 1
            answered.release()
        upload.join()
        upload_s = time.perf_counter() - started
        assert appended > 20
        assert not long or slowest_s < max(2.0, upload_s / 4)
        assert stream.head().headers["stream-snapshot-offset"] == offset(1, 6)
        assert len(stream.get(offset=offset(1, 6)).content) == appended
