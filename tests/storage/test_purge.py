"""A purge removes every byte of deleted data and changes nothing else."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from headwater.cli import main
from headwater.cli.data_directory import paused_server, wait_for_server
from headwater.cli.errors import CommandError
from headwater.storage import control_socket
from headwater.storage.interface import StorageError
from headwater.storage.offline import purge as module
from headwater.storage.offline.check import check
from headwater.storage.offline.purge import purge
from tests.http.protocol import Stream
from tests.http.sse_reader import SseReader
from tests.serving import serve
from tests.waiting import wait_until

SECRET = b"a secret that must not stay on the disk"


def filled(directory: Path, mode: str) -> None:
    with serve(DS_STORAGE__MODE=mode, DS_STORAGE__DATA_DIR=str(directory)) as server:
        with httpx.Client(base_url=server.url) as http:
            Stream(http, "kept").create("stays")
            Stream(http, "deleted").create(SECRET).delete()
            drop = {"Stream-Retention-Bytes": "10", "Stream-Retention-Drop": "allowed"}
            Stream(http, "dropped").create(SECRET, headers=drop)
        assert server.stop() == 0


def holds_secret(directory: Path) -> bool:
    return any(SECRET in path.read_bytes() for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_purge_removes_deleted_bytes_and_keeps_the_rest(tmp_path: Path, mode: str) -> None:
    directory = tmp_path / "data"
    filled(directory, mode)
    assert holds_secret(directory), "the test would prove nothing"
    with serve(DS_STORAGE__MODE=mode, DS_STORAGE__DATA_DIR=str(directory)) as server:
        with httpx.Client(base_url=server.url) as http:
            Stream(http, "dropped").delete()
        assert server.stop() == 0
    found = purge(directory, mode, shard_count=16, map_bytes=2**30)
    assert found.kept.streams == 1
    assert not holds_secret(directory)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert list(check(directory, mode)) == []
    with (
        serve(DS_STORAGE__MODE=mode, DS_STORAGE__DATA_DIR=str(directory)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        assert Stream(http, "kept").content() == b"stays"


def test_purge_that_was_interrupted_is_explained(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data.before-purge").mkdir()
    with pytest.raises(StorageError, match="a purge was interrupted"):
        purge(tmp_path / "data", "file-durable", shard_count=4, map_bytes=2**24)


def test_failed_copy_leaves_the_store_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "data"
    filled(directory, "file-durable")

    def fail(*_: object, **__: object) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(module, "copy_between", fail)
    with pytest.raises(StorageError, match="full"):
        purge(directory, "file-durable", shard_count=4, map_bytes=2**24)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert list(check(directory, "file-durable")) == []


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_purge_pauses_a_running_server(tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its address stays the same, and so does what can be read; live readers get a clean end.

    When the command has ended, the server listens again.
    """
    directory = tmp_path / "data"
    journals = str(tmp_path / "journals") if mode == "file-durable" else ""
    with (
        serve(
            program=("tests.storage.slow_start",),
            DS_STORAGE__MODE=mode,
            DS_STORAGE__DATA_DIR=str(directory),
            DS_STORAGE__JOURNAL_DIR=journals,
        ) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        kept = Stream(http, "kept").create("stays")
        Stream(http, "deleted").create(SECRET).delete()
        assert holds_secret(tmp_path), "the test would prove nothing"
        with SseReader(server, "kept") as reader:
            reader.until_up_to_date()
            with pytest.raises(SystemExit) as ended:
                main(["store", "purge", "--mode", mode, "--data-dir", str(directory)])
            assert ended.value.code == 0
            assert not [event for event in reader if "streamClosed" in event.data]
        assert "1 stream," in capsys.readouterr().out
        assert not holds_secret(tmp_path)
        assert kept.content() == b"stays"
        kept.append(" here")
        assert kept.content() == b"stays here"
        assert server.stop() == 0
    assert list(check(directory, mode)) == []


def test_server_opens_its_store_again_when_the_command_dies(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with (
        serve(DS_STORAGE__MODE="file-durable", DS_STORAGE__DATA_DIR=str(directory)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        Stream(http, "kept").create("stays")
        connection = control_socket.connect(directory, 60.0)
        assert connection is not None
        with connection:
            connection.sendall(b'{"ask": "pause"}\n')
            assert b"paused" in connection.recv(1000)
            with pytest.raises(httpx.ConnectError):
                http.get("/readyz")
        assert wait_for_server(directory)
        wait_until(lambda: server.log().count("listening on") == 2, what="the server listens again")
        assert Stream(http, "kept").content() == b"stays"


def test_server_can_be_stopped_while_it_is_paused(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with serve(DS_STORAGE__MODE="file-durable", DS_STORAGE__DATA_DIR=str(directory)) as server:
        connection = control_socket.connect(directory, 60.0)
        assert connection is not None
        with connection:
            connection.sendall(b'{"ask": "pause"}\n')
            assert b"paused" in connection.recv(1000)
            assert server.stop() == 0


def test_purge_of_a_server_with_workers_says_to_stop_it(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with (
        serve(arguments=("--workers", "2"), DS_STORAGE__MODE="file-durable", DS_STORAGE__DATA_DIR=str(directory)),
        pytest.raises(CommandError, match="Stop the server first"),
        paused_server(directory),
    ):
        pass
