"""A server of several workers behaves as one server, survives the death of a worker, and can change their number."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from headwater.client import Client
from headwater.cluster.relay import MOVE_AFTER
from headwater.cluster.shards import ShardMap
from headwater.cluster.supervisor import STARTING_FACTOR
from tests.cluster.workers import name_in, process_of, processes, wait_for_restart
from tests.http.protocol import offset
from tests.http.sse_reader import SseReader
from tests.http.subscribing import Subscription
from tests.serving import Server, serve
from tests.waiting import wait_until

DURABLE: dict[str, Any] = {"DS_STORAGE__MODE": "file-durable"}
TEXT = {"Content-Type": "text/plain"}


def _create(client: httpx.Client, name: str, data: str = "", **headers: str) -> httpx.Response:
    response = client.put(f"/v1/stream/{name}", headers=TEXT | headers, content=data)
    assert response.status_code == 201, response.text
    return response


def _text(client: httpx.Client, name: str) -> str:
    response = client.get(f"/v1/stream/{name}?offset=-1")
    assert response.status_code == 200, response.text
    return response.text


def _client(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60)


def _refused(directory: Path, workers: str, reason: str) -> None:
    """Check that a start with this many workers fails with this reason."""
    with (
        pytest.raises(AssertionError, match=reason),
        serve(DS_SERVER__WORKERS=workers, directory=directory, **DURABLE),
    ):
        pass


def test_one_connection_reaches_the_streams_of_every_worker() -> None:
    with serve(DS_SERVER__WORKERS="3") as server, _client(server) as client:
        assert len(processes(server)) == 3
        for number in range(30):
            _create(client, f"s{number}", f"first {number}")
            client.post(f"/v1/stream/s{number}", headers=TEXT, content=b", second").raise_for_status()
        assert [_text(client, f"s{number}") for number in range(30)] == [
            f"first {number}, second" for number in range(30)
        ]


def test_pipelined_responses_of_several_workers_are_in_order() -> None:
    with serve(DS_SERVER__WORKERS="3") as server:
        with _client(server) as client:
            for number in range(20):
                _create(client, f"p{number}", f"content of {number}")
        asked = "".join(
            f"GET /v1/stream/p{number}?offset=-1 HTTP/1.1\r\nHost: localhost\r\n\r\n" for number in range(20)
        )
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(asked.encode())
            received = b""
            while received.count(b"content of") < 20:
                received += raw.recv(65536)
        at = [received.index(f"content of {number}".encode()) for number in range(20)]
        assert at == sorted(at)


def _sample(client: httpx.Client, name: str) -> float:
    samples = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[:1] != "#")
    return float(samples[name])


def test_connection_moves_to_the_owner_of_its_stream_with_its_pending_request() -> None:
    name = name_in(1, 2)
    with serve(DS_SERVER__WORKERS="2") as server, _client(server) as client, ExitStack() as opened:
        _create(client, name)
        others = [opened.enter_context(_client(server)) for _ in range(8)]
        for number, other in enumerate(others):
            other.post(f"/v1/stream/{name}", headers=TEXT, content=f"{number},").raise_for_status()
        assert _sample(client, 'headwater_worker_connections{worker="1"}') >= 8
        # A moved connection still reaches the streams of every worker.
        for number, other in enumerate(others):
            _create(other, f"after{number}", "x")
        assert _text(client, name) == "0,1,2,3,4,5,6,7,"


def test_connection_that_alternates_between_two_workers_does_not_move() -> None:
    """Moving costs more than relaying: only requests in a row for one other worker move a connection again."""
    own, other = name_in(0, 2), name_in(1, 2)
    with serve(DS_SERVER__WORKERS="2") as server, _client(server) as client:

        def holder() -> int:
            """The worker that has the connection of the client."""
            here = client._transport._pool.connections[0]._connection._network_stream  # type: ignore[attr-defined]
            port = here.get_extra_info("client_addr")[1]
            for worker, process in enumerate(processes(server)):
                opened = process.net_connections()
                if any(one.status == psutil.CONN_ESTABLISHED and one.raddr.port == port for one in opened):
                    return worker
            raise AssertionError("no worker has the connection")

        for name in (own, other):
            _create(client, name)
        for _ in range(MOVE_AFTER):
            client.post(f"/v1/stream/{own}", headers=TEXT, content=b"x").raise_for_status()
        wait_until(lambda: holder() == 0, what="the end of the socket in the other worker")
        for _ in range(2 * MOVE_AFTER):
            client.post(f"/v1/stream/{other}", headers=TEXT, content=b"x").raise_for_status()
            client.post(f"/v1/stream/{own}", headers=TEXT, content=b"x").raise_for_status()
            assert holder() == 0
        for _ in range(MOVE_AFTER):
            client.post(f"/v1/stream/{other}", headers=TEXT, content=b"x").raise_for_status()
        wait_until(lambda: holder() == 1, what="the connection to move")


@pytest.mark.parametrize("workers", ["2", "3"])
def test_fork_of_a_stream_of_another_worker_outlives_its_source(workers: str) -> None:
    source, fork = name_in(0, int(workers), "source"), name_in(1, int(workers), "fork")
    with serve(DS_SERVER__WORKERS=workers) as server, _client(server) as client:
        _create(client, source, "shared")
        _create(client, fork, **{"Stream-Forked-From": f"/v1/stream/{source}"})
        client.post(f"/v1/stream/{fork}", headers=TEXT, content=b", own").raise_for_status()
        assert client.delete(f"/v1/stream/{source}").status_code == 204
        assert client.get(f"/v1/stream/{source}").status_code == 410
        assert _text(client, fork) == "shared, own"
        assert client.delete(f"/v1/stream/{fork}").status_code == 204
        assert client.get(f"/v1/stream/{fork}").status_code == 404
        # The last fork is deleted, and the source with it: both names are free.
        _create(client, source)
        _create(client, fork, "new")
        assert _text(client, fork) == "new"


def test_listing_has_the_streams_of_all_workers() -> None:
    with serve(DS_SERVER__WORKERS="3") as server, _client(server) as client:
        for number in range(12):
            _create(client, f"listed{number:02}", "x")
        found = client.get("/v1/stream/__ds/streams?prefix=listed").json()["streams"]
        assert [stream["name"] for stream in found] == [f"listed{number:02}" for number in range(12)]
        assert all(stream["next_offset"].startswith("0000000000000001_") for stream in found)
        cursor = client.get("/v1/stream/__ds/streams?live=long-poll").json()["changes_cursor"]
        for number in range(12):
            client.post(f"/v1/stream/listed{number:02}", headers=TEXT, content=b"y").raise_for_status()
        changed = client.get(f"/v1/stream/__ds/streams?live=long-poll&cursor={cursor}").json()["streams"]
        assert {stream["name"] for stream in changed} == {f"listed{number:02}" for number in range(12)}


@pytest.mark.parametrize("mode", ["memory", "file-durable", "acid"])
def test_one_worker_is_one_process(tmp_path: Path, mode: str) -> None:
    """Also with a directory that was divided between several before."""
    settings: dict[str, Any] = {"DS_STORAGE__MODE": mode}
    for workers in ("1",) if mode == "memory" else ("1", "2", "1"):
        with serve(directory=tmp_path, DS_SERVER__WORKERS=workers, **settings) as server, _client(server) as client:
            client.put("/v1/stream/kept", headers=TEXT, content=b"kept").raise_for_status()
            assert _text(client, "kept") == "kept"
            assert len(psutil.Process(server.pid).children(recursive=True)) == (2 if workers == "2" else 0)


def test_killed_worker_is_restarted_with_everything_that_it_acknowledged(tmp_path: Path) -> None:
    with serve(DS_SERVER__WORKERS="2", directory=tmp_path, **DURABLE) as server, _client(server) as client:
        names = [name_in(worker, 2) for worker in (0, 1)]
        for name in names:
            _create(client, name, "kept")
        pids = [process_of(server, worker).pid for worker in (0, 1)]
        assert f"2 workers share 16 shards, as processes {pids[0]}, {pids[1]}\n" in server.log()
        before = set(pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        # A new connection, because connections of the killed worker are closed.
        with _client(server) as other:
            wait_for_restart(server, before, 2)
            assert [_text(other, name) for name in names] == ["kept", "kept"]
        for worker in (0, 1):
            server.wait_for_log(f"worker {worker} serves as process")


def test_pending_work_survives_the_restart_of_the_worker_that_owns_its_stream(tmp_path: Path) -> None:
    with serve(DS_SERVER__WORKERS="2", directory=tmp_path, **DURABLE) as server, _client(server) as client:
        names = [name_in(1, 2, prefix) for prefix in ("a", "b")]
        for name in (*names, "wakes"):
            _create(client, name)
        subscription = Subscription(client, "pending")
        subscription.pull("wakes", "*", lease_ttl_ms=600_000)
        client.post(f"/v1/stream/{names[0]}", headers=TEXT, content=b"work").raise_for_status()
        wake = subscription.claimed()
        subscription.act("release", wake).raise_for_status()
        killed = process_of(server, 1)
        killed.kill()
        wait_for_restart(server, {killed.pid}, 2)
        with _client(server) as later:
            again = Subscription(later, "pending").claimed()
            assert [link["path"] for link in again["streams"] if link["has_pending"]] == names[:1]
            found = later.get("/v1/stream/__ds/streams").json()["streams"]
            assert {stream["name"] for stream in found} >= {*names, "wakes"}


def test_streams_of_other_workers_are_served_while_one_is_stopped(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "DS_SERVER__WORKERS": "2",
        "DS_SERVER__WORKER_TIMEOUT_SECS": "5",
        "DS_SERVER__WORKER_WAIT_SECS": "0.2",
    }
    with serve(directory=tmp_path, **settings, **DURABLE) as server:
        mine, other = name_in(0, 2), name_in(1, 2)
        with _client(server) as client:
            _create(client, mine, "here")
            _create(client, other, "there")
        before = {process.pid for process in processes(server)}
        first, second = processes(server)
        second.suspend()
        server.wait_for_log("did not answer for 5 s and is killed")
        with _client(server) as client:
            assert _text(client, mine) == "here"
            wait_for_restart(server, {second.pid}, 2)
            assert _text(client, other) == "there"
        assert first.pid in before & {process.pid for process in processes(server)}


def test_worker_is_restarted_when_the_supervisor_has_descriptors_again(tmp_path: Path) -> None:
    with serve(DS_SERVER__WORKERS="2", directory=tmp_path, **DURABLE) as server, _client(server) as client:
        names = [name_in(worker, 2) for worker in (0, 1)]
        for name in names:
            _create(client, name, "kept")
        supervisor = psutil.Process(server.pid)
        soft, hard = supervisor.rlimit(psutil.RLIMIT_NOFILE)
        survivor = process_of(server, 1)
        supervisor.rlimit(psutil.RLIMIT_NOFILE, (3, hard))
        try:
            process_of(server, 0).kill()
            server.wait_for_log("worker 0 cannot be started yet: [Errno 24] Too many open files")
            with _client(server) as other:
                assert _text(other, names[1]) == "kept"
        finally:
            supervisor.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
        with _client(server) as other:
            assert [_text(other, name) for name in names] == ["kept", "kept"]
        assert survivor in processes(server)


def test_workers_are_connected_when_one_has_descriptors_again(tmp_path: Path) -> None:
    with serve(DS_SERVER__WORKERS="2", directory=tmp_path, **DURABLE) as server:
        names = [name_in(worker, 2) for worker in (0, 1)]
        with _client(server) as client:
            for name in names:
                _create(client, name, "kept")
        limited = process_of(server, 0)
        soft, hard = limited.rlimit(psutil.RLIMIT_NOFILE)
        limited.rlimit(psutil.RLIMIT_NOFILE, (3, hard))
        try:
            process_of(server, 1).kill()
            server.wait_for_log("worker 0 cannot be connected to worker 1 yet: [Errno 24] Too many open files")
        finally:
            limited.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
        for _ in range(8):
            with _client(server) as client:
                assert [_text(client, name) for name in names] == ["kept", "kept"]
        assert process_of(server, 0) == limited


def test_worker_that_is_stopped_while_it_recovers_is_replaced(tmp_path: Path) -> None:
    settings = {"DS_SERVER__WORKERS": "2", "DS_SERVER__WORKER_TIMEOUT_SECS": "1", **DURABLE}
    with serve(directory=tmp_path, **settings) as server, _client(server) as client:
        name = name_in(1, 2)
        _create(client, name, "kept")
        before = {process.pid for process in processes(server)}
        process_of(server, 1).kill()
        while not (started := [process for process in processes(server) if process.pid not in before]):
            pass
        started[0].suspend()
        server.wait_for_log(f"(process {started[0].pid}) did not answer for {STARTING_FACTOR} s and is killed")
        with _client(server) as other:
            assert _text(other, name) == "kept"


def test_streams_of_a_dead_worker_are_503_after_a_bounded_wait_and_others_are_served(tmp_path: Path) -> None:
    settings = {"DS_SERVER__WORKERS": "2", "DS_SERVER__WORKER_WAIT_SECS": "0.5", **DURABLE}
    with serve(directory=tmp_path, **settings) as server, _client(server) as client:
        here, there = name_in(0, 2), name_in(1, 2)
        _create(client, there, "there")
        _create(client, here, "here")
        supervisor, dead = psutil.Process(server.pid), process_of(server, 1)
        # A stopped supervisor cannot restart the worker.
        supervisor.suspend()
        try:
            dead.kill()
            # While it is ending, it can still accept a connection, which is then closed.
            wait_until(lambda: dead.status() == psutil.STATUS_ZOMBIE, what="the end of the worker")
            with _client(server) as other:
                for method in ("GET", "POST"):
                    began_s = time.monotonic()
                    refused = other.request(
                        method, f"/v1/stream/{there}", headers=TEXT, content=b"x"[: method == "POST"]
                    )
                    assert refused.status_code == 503, refused.text
                    assert refused.json()["code"] == "worker_unavailable"
                    assert int(refused.headers["retry-after"]) >= 1
                    # The default is 10 s.
                    assert 0.4 < time.monotonic() - began_s < 9
                    assert _text(other, here) == "here"
                # A large snapshot is refused at once, before its body is sent.
                names = (f"bucket{number}" for number in range(99))
                bucket = next(name for name in names if ShardMap(16, 2).owner_of_bucket(name) == 1)
                refused = other.put(f"/ds/{bucket}/log/snapshot/{offset(0, 0)}", content=b"x" * 300_000)
                assert (refused.status_code, refused.json()["code"]) == (503, "worker_unavailable")
                assert "is being restarted" in refused.json()["detail"], "it did not wait"
                assert int(refused.headers["retry-after"]) >= 1
                not_ready = other.get("/readyz")
                assert (not_ready.status_code, "worker 1" in not_ready.text) == (503, True)
                assert _sample(other, 'headwater_worker_up{worker="1"}') == 0
        finally:
            supervisor.resume()
        wait_for_restart(server, {dead.pid}, 2)
        with _client(server) as other:
            assert _text(other, there) == "there"


def test_metrics_are_summed_and_reported_for_each_worker() -> None:
    with serve(DS_SERVER__WORKERS="3") as server, _client(server) as client:
        names = [name_in(worker, 3, "metered") for worker in (0, 1, 1, 2)]
        for number, name in enumerate(names):
            client.put(f"/v1/stream/{name}", headers=TEXT).raise_for_status()
            client.post(f"/v1/stream/{name}", headers=TEXT, content=str(number).encode()).raise_for_status()
        assert [_sample(client, f'headwater_worker_appends_total{{worker="{number}"}}') for number in range(3)] == [
            1,
            2,
            1,
        ]
        assert _sample(client, "headwater_appends_total") == 4
        streams = [_sample(client, f'headwater_worker_streams{{worker="{number}"}}') for number in range(3)]
        assert sum(streams) == _sample(client, "headwater_streams")


def test_metrics_and_readiness_do_not_wait_for_a_stopped_worker(tmp_path: Path) -> None:
    settings = {"DS_SERVER__WORKERS": "2", "DS_SERVER__WORKER_TIMEOUT_SECS": "60", **DURABLE}
    with serve(directory=tmp_path, **settings) as server:
        stopped = process_of(server, 1)
        stopped.suspend()
        try:
            with _client(server) as client:
                assert _sample(client, 'headwater_worker_up{worker="1"}') == 0
                assert "did not respond" in client.get("/readyz").text
        finally:
            stopped.resume()


def test_death_of_a_worker_ends_a_server_in_memory() -> None:
    with serve(DS_SERVER__WORKERS="2") as server:
        assert "all streams are lost when the server stops" in server.log()
        processes(server)[1].kill()
        assert server.process.wait(timeout=60) == 1
        message = "died, and with it its streams, because storage mode is memory"
        wait_until(lambda: message in server.log(), what="the reason is logged")
        server.wait_for_log("worker 1")


def test_number_of_workers_can_change_at_every_start(tmp_path: Path) -> None:
    names = [f"s{number}" for number in range(20)]
    with serve(DS_SERVER__WORKERS="1", directory=tmp_path, **DURABLE) as server, _client(server) as client:
        for name in names:
            _create(client, name, f"data of {name}")
        for name in names[:10]:
            _create(client, f"fork-of-{name}", **{"Stream-Forked-From": f"/v1/stream/{name}"})
        client.delete(f"/v1/stream/{names[0]}").raise_for_status()
        for bucket in ("orders", "users"):
            client.put(f"/ds/{bucket}").raise_for_status()
            client.put(f"/ds/{bucket}/one", headers=TEXT, content=b"in a bucket").raise_for_status()
        subscription = {"type": "pull-wake", "streams": names[1:5], "wake_stream": "wakes"}
        _create(client, "wakes")
        client.put("/v1/stream/__ds/subscriptions/all", json=subscription).raise_for_status()
    for workers in ("2", "3", "1", "2"):
        with serve(DS_SERVER__WORKERS=workers, directory=tmp_path, **DURABLE) as server, _client(server) as client:
            assert client.get(f"/v1/stream/{names[0]}").status_code == 410
            assert [_text(client, name) for name in names[1:]] == [f"data of {name}" for name in names[1:]]
            assert [_text(client, f"fork-of-{name}") for name in names[:10]] == [
                f"data of {name}" for name in names[:10]
            ]
            assert client.get("/ds/orders/streams").json()["streams"][0]["stream_id"] == "one"
            assert client.get("/ds/users/one").text == "in a bucket"
            links = client.get("/v1/stream/__ds/subscriptions/all").json()["streams"]
            assert {link["path"] for link in links} == set(names[1:5])


def test_more_workers_than_shards_are_refused(tmp_path: Path) -> None:
    _refused(tmp_path, "17", "17 workers are more than the 16 shards")


@pytest.mark.parametrize("workers", ["1", "2", "3"])
def test_start_in_another_mode_is_refused_and_changes_nothing(tmp_path: Path, workers: str) -> None:
    with serve(DS_SERVER__WORKERS="2", directory=tmp_path, **DURABLE) as server, _client(server) as client:
        _create(client, "s", "data")
    acid: dict[str, Any] = {"DS_STORAGE__MODE": "acid", "DS_SERVER__WORKERS": workers}
    with (
        pytest.raises(AssertionError, match=r"written by storage mode file-fast\W+or\W+file-durable,\W+not\W+acid"),
        serve(directory=tmp_path, **acid),
    ):
        pass
    with serve(DS_SERVER__WORKERS="2", directory=tmp_path, **DURABLE) as server, _client(server) as client:
        assert _text(client, "s") == "data"


def test_new_directory_of_several_workers_is_private(tmp_path: Path) -> None:
    with serve(DS_SERVER__WORKERS="2", directory=tmp_path, **DURABLE) as server:
        directory = next(tmp_path.rglob("workers-*"))
        assert [path for path in (directory, *directory.rglob("*")) if path.lstat().st_mode & 0o077] == []
        assert len(processes(server)) == 2


def test_directory_of_an_earlier_release_has_one_shard(tmp_path: Path) -> None:
    with serve(directory=tmp_path, **DURABLE) as server, _client(server) as client:
        _create(client, "old", "data")
    recorded = next(tmp_path.rglob("FORMAT"))
    recorded.write_text(recorded.read_text().replace(',"shards":16', ""))
    _refused(tmp_path, "2", r"--from-mode\W+file-durable\W+--from-dir(.|\n)+--worker-shards\W+16")
    with serve(directory=tmp_path, **DURABLE) as server, _client(server) as client:
        assert _text(client, "old") == "data"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_directories_of_an_earlier_stack_are_refused_with_the_command_that_joins_them(
    tmp_path: Path, workers: str
) -> None:
    (tmp_path / "shard-00").mkdir()
    (tmp_path / "shard-01").mkdir()
    with (
        pytest.raises(AssertionError, match=r"join them with\W+`headwater store join-shards`"),
        serve(directory=tmp_path, DS_SERVER__WORKERS=workers, DS_STORAGE__DATA_DIR=".", **DURABLE),
    ):
        pass


def test_second_server_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    with serve(DS_SERVER__WORKERS="2", directory=tmp_path, **DURABLE):
        _refused(tmp_path, "2", "is in use by process")


def test_server_starts_after_it_was_killed_with_its_workers(tmp_path: Path) -> None:
    """Leftover locks and sockets, or a path too long for a socket address, do not prevent the start."""
    directory = tmp_path / ("long" * 40)
    directory.mkdir()
    with serve(DS_SERVER__WORKERS="2", directory=directory, **DURABLE) as server:
        with _client(server) as client:
            _create(client, "kept", "data")
        server.kill()
    with serve(DS_SERVER__WORKERS="2", directory=directory, **DURABLE) as server, _client(server) as client:
        assert _text(client, "kept") == "data"


def test_names_of_the_tests_belong_to_different_workers() -> None:
    assert ShardMap(16, 2).owner_of(name_in(0, 2)) != ShardMap(16, 2).owner_of(name_in(1, 2))


def test_many_streams_are_followed_by_their_changes() -> None:
    """The streams are in several processes, so no single process can follow them over one connection."""
    with serve(DS_SERVER__WORKERS="3") as server, Client(server.url) as client:
        for number in range(6):
            client.stream(f"m/{number}").create(body=b"[0]")
        following = client.follow_many("m/")
        assert {next(following).name for _ in range(6)} == {f"m/{number}" for number in range(6)}
        client.stream("m/3").append(1)
        found = next(following)
        assert (found.name, found.batch.values) == ("m/3", [1])


@pytest.mark.parametrize("trusted", [True, False])
def test_relayed_requests_use_the_headers_of_trusted_proxies_only(trusted: bool) -> None:
    forwarded = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https", "X-Forwarded-Host": "example.com"}
    settings: dict[str, Any] = {"DS_SERVER__TRUSTED_PROXIES": "127.0.0.1"} if trusted else {}
    with (
        serve(DS_SERVER__WORKERS="3", DS_LOG__RUST_LOG="debug", **settings) as server,
        _client(server) as client,
    ):
        names = [name_in(worker, 3, "proxied") for worker in range(3)]
        fork = name_in(1, 3, "proxied-fork")
        wanted = "https://example.com" if trusted else server.url
        for name in names:
            assert _create(client, name, **forwarded).headers["location"] == f"{wanted}/v1/stream/{name}"
        made = _create(client, fork, **forwarded, **{"Stream-Forked-From": f"/v1/stream/{names[2]}"})
        assert made.headers["location"] == f"{wanted}/v1/stream/{fork}"
        for name in (*names, fork):
            server.wait_for_log(f"path=/v1/stream/{name} ")
            lines = [line for line in server.log().splitlines() if f"path=/v1/stream/{name} " in line]
            assert all(("client=203.0.113.9" in line) == trusted for line in lines), lines
            assert all("client=" in line for line in lines), lines


@pytest.mark.parametrize("workers", ["1", "2"])
def test_addresses_that_are_served_do_not_depend_on_the_number_of_workers(workers: str) -> None:
    """`::` is IPv6 only, and each address of a name is served."""
    with serve(DS_SERVER__WORKERS=workers, DS_SERVER__HOST="::", DS_SERVER__ALLOWED_HOSTS="*") as server:
        with socket.create_connection(("::1", server.port)):
            """It is served."""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))
    found = {family for family, *_ in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
    with serve(DS_SERVER__WORKERS=workers, DS_SERVER__HOST="localhost") as server:
        listening = [
            opened
            for process in (psutil.Process(server.pid), *processes(server))
            for opened in process.net_connections()
            if opened.status == psutil.CONN_LISTEN
        ]
        assert {opened.family for opened in listening} == found


def test_limit_of_leases_holds_for_all_workers_together() -> None:
    settings: dict[str, Any] = {"DS_SERVER__WORKERS": "2", "DS_LIMITS__MAX_LEASES": "1"}
    with serve(**settings) as server, _client(server) as client:
        names = [name_in(worker, 2) for worker in (0, 1)]

        def lease(name: str, action: str) -> httpx.Response:
            media_type = {"Content-Type": "application/vnd.headwater.lease+json"}
            content = b'{"holder":"w","ttl_ms":600000}'
            return client.post(f"/v1/stream/{name}?lease={action}", headers=media_type, content=content)

        for name in names:
            _create(client, name)
        for first, second in (names, names[::-1]):
            assert lease(first, "acquire").status_code == 200
            refused = lease(second, "acquire")
            assert (refused.status_code, refused.json().get("code")) == (413, "too_many_leases")
            assert lease(first, "acquire").status_code == 200, "its terms can be replaced"
            assert lease(first, "release").status_code == 204


def test_quota_of_a_namespace_holds_for_all_workers_together() -> None:
    """Every response is followed at once by a request to another worker, which must know the usage."""
    with serve(DS_SERVER__WORKERS="3", DS_QUOTAS__MAX_BYTES="100") as server, _client(server) as client:
        first, second = (name_in(worker, 3, "tenant/s") for worker in (1, 2))

        def append(size: int) -> int:
            return client.post(f"/v1/stream/{second}", headers=TEXT, content=b"y" * size).status_code

        _create(client, second)
        for _ in range(10):
            _create(client, first, "x" * 60)
            assert append(41) == 413
            assert append(40) == 204
            client.delete(f"/v1/stream/{first}").raise_for_status()
            assert append(61) == 413
            assert append(60) == 204
            client.delete(f"/v1/stream/{second}").raise_for_status()
            _create(client, second)


def test_reader_or_connection_of_another_worker_counts_once_for_its_namespace() -> None:
    quotas: dict[str, Any] = {"DS_QUOTAS__MAX_READERS": "2", "DS_QUOTAS__NAMESPACES": "one:connections=1"}
    with serve(DS_SERVER__WORKERS="2", **quotas) as server, _client(server) as client:
        for worker in (0, 1):
            name = name_in(worker, 2, f"two{worker}/s")
            _create(client, name)
            with SseReader(server, name) as first, SseReader(server, name) as second:
                assert (first.status, second.status) == (200, 200)
                refused = httpx.get(server.stream_url(name), params={"offset": "now", "live": "sse"}, timeout=60)
                assert (refused.status_code, refused.json()["code"]) == (429, "too_many_readers")
        names = [name_in(worker, 2, "one/s") for worker in (0, 1)]
        for name in names:
            _create(client, name)
        with _client(server) as other:
            for _ in range(2 * MOVE_AFTER):
                for http in (client, other):
                    for name in names:
                        http.post(f"/v1/stream/{name}", headers=TEXT, content=b"x").raise_for_status()
            for http in (client, other):
                for _ in range(2 * MOVE_AFTER):
                    http.post(f"/v1/stream/{names[0]}", headers=TEXT, content=b"x").raise_for_status()
