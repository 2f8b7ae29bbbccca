"""Every read of damaged data is refused with `data_corrupt`, never with `internal_error`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.http.protocol import Stream, assert_problem
from tests.http.watching import samples
from tests.serving import Server, serve
from tests.waiting import wait_until

PAGE_BYTES = 4096
MESSAGES = 4000


def packs(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.pack"))


def damage(pack: Path) -> None:
    """Flip one bit in every page except the last one, which contains the pack's directory."""
    data = bytearray(pack.read_bytes())
    for at in range(PAGE_BYTES // 2, len(data) - 2 * PAGE_BYTES, PAGE_BYTES):
        data[at] ^= 1
    pack.write_bytes(data)


def wait_until_saved(server: Server, memory_bytes_max: int) -> None:
    """Wait until checkpoints have moved all but this much from memory into packs."""
    wait_until(
        lambda: samples(server)["headwater_storage_memory_bytes"],
        lambda found: found <= memory_bytes_max,
        what="the memory after a checkpoint",
    )


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stream, list[str]]]:
    """A stream with everything but its tail in damaged packs, and some of its offsets."""
    directory = tmp_path_factory.mktemp("corrupt")
    body = "[" + ",".join(f'{{"number":"{number:060d}"}}' for number in range(MESSAGES)) + "]"
    with (
        serve(directory=directory, DS_STORAGE__MODE="file-durable", DS_STORAGE__HOT_TAIL_BYTES="65536") as server,
        httpx.Client(base_url=server.url) as http,
    ):
        stream = Stream(http, "damaged", "application/json").create()
        for _ in range(3):
            stream.append(body)
        ranges = stream.get(offset="-1", splits=8).json()["ranges"]
        wait_until_saved(server, len(body) * 3 // 2)
    found = packs(directory)
    assert found, "the data was saved to packs"
    for pack in found:
        damage(pack)
    with (
        serve(directory=directory, DS_STORAGE__MODE="file-durable", DS_STORAGE__HOT_TAIL_BYTES="65536") as server,
        httpx.Client(base_url=server.url) as http,
    ):
        yield Stream(http, "damaged", "application/json"), [each["end"] for each in ranges[:4]]
        assert "internal_error" not in server.log()
        assert "Traceback" not in server.log()


def test_catch_up_from_the_beginning_is_data_corrupt(damaged: tuple[Stream, list[str]]) -> None:
    assert_problem(damaged[0].get(offset="-1"), 500, "data_corrupt")


def test_catch_up_from_a_damaged_offset_is_data_corrupt(damaged: tuple[Stream, list[str]]) -> None:
    stream, offsets = damaged
    for offset in offsets:
        assert_problem(stream.get(offset=offset), 500, "data_corrupt")


def test_splits_of_damaged_data_are_data_corrupt(damaged: tuple[Stream, list[str]]) -> None:
    assert_problem(damaged[0].get(offset="-1", splits=10), 500, "data_corrupt")


def test_frames_of_damaged_data_are_data_corrupt(damaged: tuple[Stream, list[str]]) -> None:
    assert_problem(damaged[0].get(offset="-1", frames=1), 500, "data_corrupt")


def test_until_a_damaged_offset_is_data_corrupt(damaged: tuple[Stream, list[str]]) -> None:
    stream, offsets = damaged
    assert_problem(stream.get(offset="-1", until=offsets[0]), 500, "data_corrupt")


def test_long_poll_on_damaged_data_is_data_corrupt(damaged: tuple[Stream, list[str]]) -> None:
    stream, offsets = damaged
    assert_problem(stream.get(offset=offsets[0], live="long-poll"), 500, "data_corrupt")


def test_fork_at_a_damaged_offset_is_data_corrupt(damaged: tuple[Stream, list[str]]) -> None:
    stream, offsets = damaged
    headers = {"Stream-Forked-From": "/v1/stream/damaged", "Stream-Fork-Offset": offsets[0]}
    assert_problem(stream.http.put("/v1/stream/forked", headers=headers), 500, "data_corrupt")


def test_the_tail_is_still_read_and_appended_to(damaged: tuple[Stream, list[str]]) -> None:
    stream, _ = damaged
    tail = stream.tail()
    stream.append('{"number":1}')
    assert stream.get(offset=tail).json() == [{"number": 1}]
