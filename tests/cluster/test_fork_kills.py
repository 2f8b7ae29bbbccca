"""kill -9 between the records of a fork whose name and source have different owners, at every step.

Worker 2 has the source (itself a placed fork, so that its placement is known without it), worker 1 is the home of the
fork's name. In the first tests a worker is stopped with SIGSTOP until the journal of the other shows that it has
written its record. In the last one, the worker of each single write is killed before, in the middle of or after it.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from headwater.cluster.placements import PREFIX
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.offline.check import check
from headwater.storage.offline.families import locked, tools_of
from headwater.storage.offline.interface import open_reader
from headwater.storage.worker_stores import store_directories
from tests.cluster.killed_at_writes import MOMENTS, count_of_writes, is_planned, kill_at
from tests.cluster.workers import name_in, process_of, processes, wait_for_restart
from tests.serving import Server, serve
from tests.waiting import wait_until

TEXT = {"Content-Type": "text/plain"}
HOME, PLACE = 1, 2
WRITES_OF_A_LIFE = 14
"""Writes to journals in the life of a family: 4 creations, 4 deletions, and 3 placements with their removals."""
NEVER = 10**9
SETTINGS = {
    "DS_SERVER__WORKERS": "3",
    "DS_STORAGE__MODE": "file-durable",
    # Stopped workers must not be killed, and requests wait for workers that are restarted.
    "DS_SERVER__WORKER_TIMEOUT_SECS": "60",
    "DS_SERVER__WORKER_WAIT_SECS": "60",
}


class Family:
    """An origin at worker 2, the source (a fork of it whose home is worker 0), and the fork whose home is worker 1."""

    def __init__(self, server: Server, number: int) -> None:
        self.server = server
        self.origin = name_in(PLACE, 3, f"origin{number}-")
        self.source = name_in(0, 3, f"source{number}-")
        self.fork = name_in(HOME, 3, f"fork{number}-")

    @classmethod
    def create(cls, server: Server, number: int) -> Family:
        """A family whose origin and source exist."""
        family = cls(server, number)
        with family.client() as client:
            assert client.put(family.path(family.origin), headers=TEXT, content=b"shared").status_code == 201
            family.make(client, family.source, family.origin)
        return family

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.server.url, timeout=60)

    def path(self, name: str) -> str:
        return f"/v1/stream/{name}"

    def make(self, client: httpx.Client, name: str, source: str, **headers: str) -> None:
        made = client.put(self.path(name), headers={"Stream-Forked-From": self.path(source), **headers})
        assert made.status_code == 201, made.text

    def begin(self, method: str) -> socket.socket:
        """Send a request about the fork without waiting for its response."""
        connection = socket.create_connection(("127.0.0.1", self.server.port))
        head = f"{method} {self.path(self.fork)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n"
        if method == "PUT":
            head += f"Stream-Forked-From: {self.path(self.source)}\r\n"
        connection.sendall(f"{head}\r\n".encode())
        return connection

    def is_written(self, worker: int, text: str) -> bool:
        """Whether the journal of a worker has a record with this text."""
        segments = self.server.directory.rglob(f"workers-*/{worker:02}/log/*")
        return any(text.encode() in path.read_bytes() for path in segments if path.is_file())

    def wait_for_placement(self) -> None:
        wait_until(lambda: self.is_written(HOME, f"placement/{self.fork}"), what="the placement is durable")

    def check(self, *, exists: bool | None) -> None:
        """Check that no byte of the source is lost, and that no reference to it is left when its forks are deleted."""
        with self.client() as client:
            for name in (self.origin, self.source):
                assert client.get(self.path(name), params={"offset": "-1"}).text == "shared"
            found = client.get(self.path(self.fork), params={"offset": "-1"})
            assert exists is None or found.status_code == (200 if exists else 404), found.text
            if found.status_code == 404:
                self.make(client, self.fork, self.source)
            for name in (self.source, self.origin):
                assert client.delete(self.path(name)).status_code == 204
                assert client.get(self.path(name)).status_code == 410
            assert client.get(self.path(self.fork), params={"offset": "-1"}).text == "shared"
            assert client.delete(self.path(self.fork)).status_code == 204
            for name in (self.fork, self.source, self.origin):
                assert client.get(self.path(name)).status_code == 404, name
                assert client.put(self.path(name), headers=TEXT, content=b"new").status_code == 201


def kill(server: Server, workers: tuple[int, ...]) -> None:
    victims = [process_of(server, worker) for worker in workers]
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    for process in processes(server):
        if process not in victims and process.status() == psutil.STATUS_STOPPED:
            process.resume()
    wait_for_restart(server, {victim.pid for victim in victims}, 3)
    # Its restart is complete when it serves again.
    wait_until(lambda: httpx.get(f"{server.url}/readyz", timeout=60).status_code == 200, what="all workers are ready")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory: Path = tmp_path_factory.mktemp("forks")
    with serve(directory=directory, **SETTINGS) as running:  # type: ignore[arg-type]
        yield running
    root = next(directory.rglob("WORKERS")).parent
    assert list(check(root)) == []


KILLED = [
    pytest.param((HOME, PLACE), id="both"),
    pytest.param((HOME,), id="home", marks=pytest.mark.long),
    pytest.param((PLACE,), id="place", marks=pytest.mark.long),
    pytest.param((0, HOME, PLACE), id="all", marks=pytest.mark.long),
]


@pytest.mark.parametrize("killed", KILLED)
def test_kill_after_the_placement_and_before_the_fork(server: Server, killed: tuple[int, ...]) -> None:
    family = Family.create(server, id(killed))
    process_of(server, PLACE).suspend()
    with family.begin("PUT"):
        family.wait_for_placement()
        kill(server, killed)
    # If the other worker survives, it may complete the home's request.
    family.check(exists=False if PLACE in killed else None)


@pytest.mark.parametrize("killed", KILLED)
def test_kill_after_the_fork_and_before_its_home_knows(server: Server, killed: tuple[int, ...]) -> None:
    family = Family.create(server, id(killed) + 1)
    process_of(server, PLACE).suspend()
    with family.begin("PUT"):
        family.wait_for_placement()
        home = process_of(server, HOME)
        home.suspend()
        process_of(server, PLACE).resume()
        wait_until(lambda: _is_written_beside(home, family), what="the fork is durable")
        kill(server, killed)
    family.check(exists=True)


@pytest.mark.parametrize("killed", KILLED)
def test_kill_before_a_fork_is_deleted(server: Server, killed: tuple[int, ...]) -> None:
    family = Family.create(server, id(killed) + 2)
    with family.client() as client:
        family.make(client, family.fork, family.source)
    process_of(server, PLACE).suspend()
    with family.begin("DELETE"):
        kill(server, killed)
    family.check(exists=None)


@pytest.mark.parametrize("killed", KILLED)
def test_kill_after_the_expiry_of_a_fork_and_before_its_home_knows(server: Server, killed: tuple[int, ...]) -> None:
    family = Family.create(server, id(killed) + 3)
    with family.client() as client:
        family.make(client, family.fork, family.source, **{"Stream-TTL": "1"})
        sizes = _journal_bytes(family)
        process_of(server, HOME).suspend()
        wait_until(lambda: _journal_bytes(family) != sizes, what="the fork expires")
        kill(server, killed)
        # A HEAD does not extend the TTL.
        fork = f"{server.url}{family.path(family.fork)}"
        wait_until(lambda: httpx.head(fork, timeout=60).status_code == 404, what="the fork is gone")
    family.check(exists=False)


def _journal_bytes(family: Family) -> bytes:
    """The contents of the journal of the fork's worker."""
    segments = sorted(family.server.directory.rglob(f"workers-*/{PLACE:02}/log/*"))
    return b"".join(path.read_bytes().rstrip(b"\0") for path in segments if path.is_file())


def _is_written_beside(home: psutil.Process, family: Family) -> bool:
    """Whether the fork is durable while its home is stopped. The home may not have requested it yet."""
    if family.is_written(PLACE, family.fork):
        return True
    if home.status() == psutil.STATUS_STOPPED:
        home.resume()
    else:
        home.suspend()
    return False


class Life:
    """The whole life of a family. A request whose worker dies is repeated, as a client would do it."""

    def __init__(self, family: Family, client: httpx.Client) -> None:
        self._family = family
        self._client = client

    def live(self) -> None:
        family = self._family
        origin, source, fork = names = (family.origin, family.source, family.fork)
        self._request("PUT", origin, 200, 201, content=b"shared", headers=TEXT)
        self._fork(source, origin)
        self._fork(fork, source)
        self._expect_shared(*names)
        self._request("DELETE", fork, 204, 404)
        self._expect_shared(origin, source)
        self._fork(fork, source)
        self._request("DELETE", source, 204, 410)
        self._request("DELETE", origin, 204, 410)
        for name in (source, origin):
            self._request("GET", name, 410)
        self._expect_shared(fork)
        self._request("DELETE", fork, 204, 404)
        for name in names:
            self._request("GET", name, 404)

    def use_names_again(self) -> None:
        """Use the names for something else, and wait for what was still in progress about them."""
        for name in (self._family.origin, self._family.source, self._family.fork):
            self._request("PUT", name, 201, content=b"new", headers={"Content-Type": "text/html"})
            assert self._request("GET", name, 200).text == "new"
            self._request("DELETE", name, 204)

    def _fork(self, name: str, source: str) -> None:
        self._request("PUT", name, 200, 201, headers={"Stream-Forked-From": self._family.path(source)})

    def _expect_shared(self, *names: str) -> None:
        for name in names:
            assert self._request("GET", name, 200).text == "shared", name

    def _request(self, method: str, name: str, *statuses: int, **options: Any) -> httpx.Response:
        while True:
            try:
                found = self._client.request(method, self._family.path(name), **options)
            except httpx.TransportError:
                continue
            assert found.status_code in statuses, f"{method} {name}: {found.status_code} {found.text}"
            return found


def _kinds() -> Iterator[Any]:
    for mode in ("file-durable", "acid"):
        for everyone in (False, True):
            for moment in MOMENTS:
                is_short = mode == "file-durable" and not everyone and moment == "after"
                marks = () if is_short else pytest.mark.long
                yield pytest.param(
                    mode, moment, everyone, marks=marks, id=f"{mode}-{moment}-{'all' if everyone else 'one'}"
                )


@pytest.mark.parametrize(("mode", "moment", "everyone"), list(_kinds()))
def test_kill_at_every_write_of_the_life_of_a_family(
    tmp_path: Path, mode: str, moment: str, everyone: bool, long: bool
) -> None:
    settings = {**SETTINGS, "DS_STORAGE__MODE": mode}
    with serve(directory=tmp_path, program=("tests.cluster.killed_at_writes",), **settings) as server:  # type: ignore[arg-type]
        family = Family(server, 0)
        kill_at(tmp_path, NEVER, moment, everyone=everyone)
        with family.client() as client:
            life = Life(family, client)
            life.live()
            life.use_names_again()
        assert count_of_writes(tmp_path) == WRITES_OF_A_LIFE + 6
        for write in range(1, WRITES_OF_A_LIFE + 1, 1 if long else 4):
            family = Family(server, write)
            kill_at(tmp_path, write, moment, everyone=everyone)
            with family.client() as client:
                Life(family, client).live()
            wait_until(lambda: not is_planned(tmp_path), what="the write is reached")
        wait_until(lambda: httpx.get(f"{server.url}/readyz", timeout=60).status_code == 200, what="all are ready")
    root = next(tmp_path.rglob("WORKERS")).parent
    assert list(check(root)) == []
    for store in store_directories(root):
        filesystem = RealFilesystem()
        with locked(filesystem, store), open_reader(tools_of(store), filesystem, store) as reader:
            assert not list(reader.catalog), "no stream is left"
            assert not [key for key in reader.catalog.documents if key.startswith(PREFIX)], "no placement is left"
