"""`headwater up` as a user runs it: quick test, status, logs, down, a second start, each service killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.stack.stacks import Stack, identity, stack
from tests.waiting import wait_until

# The services of this module are started once, in one test worker.
# Seed 000, "Quick test", line by line; only the start and the minting of the token are our commands.
QUICK_TEST = """
curl -s http://localhost:8080/healthz
TOKEN=$({headwater} token)
curl -s -o /dev/null -w '%{{http_code}}' -X PUT -H "Authorization: Bearer $TOKEN" -H "Content-Type: text/plain" \
 http://localhost:8080/v1/stream/test-1
curl -s -o /dev/null -w '%{{http_code}}' -X POST -H "Authorization: Bearer $TOKEN" -H "Content-Type: text/plain" \
 -d "hello" http://localhost:8080/v1/stream/test-1
curl -s -H "Authorization: Bearer $TOKEN" http://localhost:8080/v1/stream/test-1
curl -s -o /dev/null -w '%{{http_code}}' -X PUT http://localhost:8080/v1/stream/test-2
"""
QUICK_ANSWERS = ["ok", "201", "204", "hello", "401"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(
        tmp_path_factory.mktemp("up"),
        DS_SERVER__LONG_POLL_TIMEOUT_SECS="2",
        DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="3",
        DS_STACK__RESTART_DELAY_SECS="0.2",
    ) as made:
        made.up()
        yield made


def quick_test(running: Stack) -> list[str]:
    script = QUICK_TEST.format(headwater=" ".join(running.command()))
    script = script.replace("localhost:8080", f"localhost:{running.ports['proxy']}")
    script = re.sub(r"(?m)^(curl .*(?:\n .*)*)$", r"\1; echo", script)
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=running.directory,
        env=running.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_quick_test_passes_line_by_line(running: Stack) -> None:
    assert quick_test(running) == QUICK_ANSWERS


def test_printed_command_creates_a_token_for_the_stream_browser(running: Stack) -> None:
    assert f"stream browser: http://localhost:{running.ports['proxy']}/ui/ " in running.said
    [command] = re.findall(r"`headwater (token.*?)` creates one", running.said)
    with running.client(running.token(*command.split()[1:])) as http:
        assert http.get("/v1/stream/__ds/streams").status_code == 200, "the list of streams"
    with running.client(running.token()) as http:
        assert http.get("/v1/stream/__ds/streams").status_code == 403, "it has a reserved name"


def test_status_lists_every_service_with_its_process_port_and_log(running: Stack) -> None:
    done = running.run("status")
    assert done.returncode == 0, done.stdout
    status = running.status()
    assert status["phase"] == "up"
    assert [part["name"] for part in status["parts"]] == ["server", "envoy"]
    for part in status["parts"]:
        assert part["state"] == "up"
        assert identity(part["pid"]).is_alive
        assert Path(part["log"]).exists()
        assert str(part["port"]) in done.stdout


def test_error_of_a_second_up_names_the_first(running: Stack) -> None:
    for arguments in (("up",), ("up", "--detach")):
        done = running.run(*arguments)
        assert done.returncode == 1
        assert "already runs" in done.stderr
        assert "headwater down" in done.stderr


def test_logs_are_printed_for_all_or_one_service_and_followed(running: Stack) -> None:
    token = running.token()
    with running.client(token) as client:
        client.get("/v1/stream/in-the-log")
    wait_until(lambda: "/v1/stream/in-the-log" in running.run("logs", "envoy").stdout)
    both = running.run("logs").stdout
    assert "server | " in both
    assert "envoy | " in both
    assert running.run("logs", "nothing").returncode == 2
    following = subprocess.Popen(
        running.command("logs", "-f", "-n", "0", "envoy"),
        cwd=running.directory,
        env=running.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert following.stdout is not None

        def ask() -> None:
            # Repeatedly, because the command does not report when it is ready to follow.
            def ask_once() -> bool:
                with running.client(token) as client:
                    client.get("/v1/stream/followed")
                return following.poll() is not None

            wait_until(ask_once, every_s=0.3)

        asking = threading.Thread(target=ask)
        asking.start()
        assert "/v1/stream/followed" in following.stdout.readline()
    finally:
        following.terminate()
        following.communicate(timeout=60)
        asking.join()


def test_private_keys_are_protected_and_the_server_requires_tokens(running: Stack) -> None:
    assert (running.data / "keys").stat().st_mode & 0o077 == 0
    for port in (running.ports["server"],):
        addresses = Path("/proc/net/tcp").read_text().upper()
        assert f"0100007F:{port:04X}" in addresses
        assert f"00000000:{port:04X}" not in addresses


class Tail(threading.Thread):
    """Reads a stream live through the proxy, resuming from its last offset whenever the connection ends."""

    def __init__(self, running: Stack, token: str, name: str) -> None:
        super().__init__(daemon=True)
        self._running, self._token, self._name = running, token, name
        self.messages: list[int] = []
        self.resumed = 0
        self.ended = threading.Event()

    def run(self) -> None:
        offset = "-1"
        while not self.ended.is_set():
            try:
                with self._running.client(self._token) as client:
                    answer = client.get(f"/v1/stream/{self._name}", params={"offset": offset, "live": "long-poll"})
                if answer.status_code == 200:
                    self.messages += answer.json()
                if answer.status_code in {200, 204}:
                    offset = answer.headers["stream-next-offset"]
                    continue
            except (httpx.TransportError, ValueError):
                pass
            self.resumed += 1
            time.sleep(0.05)


def write_and_kill(running: Stack, parts: list[str]) -> None:
    """Write and tail while each service is killed in turn; no acknowledged write may be lost."""
    token = running.token()
    name = f"killed-{'-'.join(parts)}"
    with running.client(token) as client:
        created = client.put(f"/v1/stream/{name}", headers={"Content-Type": "application/json"})
        assert created.status_code == 201
    tail = Tail(running, token, name)
    tail.start()
    acknowledged: list[int] = []
    ended = threading.Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            headers = {"Producer-Id": "writer", "Producer-Epoch": "0", "Producer-Seq": str(number)}
            try:
                with running.client(token) as client:
                    while not ended.is_set():
                        headers["Producer-Seq"] = str(number)
                        answer = client.post(f"/v1/stream/{name}", json=[number], headers=headers)
                        if answer.status_code not in {200, 204}:
                            break
                        acknowledged.append(number)
                        number += 1
            except httpx.TransportError:
                pass
            time.sleep(0.02)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for part in parts:
            pid = running.kill(part)
            killed = identity(pid)
            assert killed.wait(60)
            running.wait_until_up_again(part, pid)
            enough = len(acknowledged) + 10
            wait_until(lambda: len(acknowledged), enough.__le__, what=f"writes after {part} was killed")
            status = running.status()
            assert status["phase"] == "up"
            found = next(one for one in status["parts"] if one["name"] == part)
            assert found["state"] == "up"
            assert found["restarts"] >= 1
            assert identity(found["pid"]).is_alive
    finally:
        ended.set()
        writer.join()
    wait_until(lambda: len(tail.messages), lambda count: count >= len(acknowledged))
    tail.ended.set()
    tail.join(60)
    # Exactly the acknowledged writes, in order; the producer's sequence numbers prevent duplicates. One more may have
    # been written whose response was lost with the connection.
    assert acknowledged == list(range(len(acknowledged)))
    assert tail.messages[: len(acknowledged)] == acknowledged
    assert len(tail.messages) <= len(acknowledged) + 1
    assert tail.resumed


def test_no_acknowledged_write_is_lost_when_services_are_killed(running: Stack) -> None:
    write_and_kill(running, ["server", "envoy"])


def test_services_exit_with_a_killed_supervisor_and_the_next_one_starts(running: Stack) -> None:
    status = running.note()
    os.kill(status["pid"], signal.SIGKILL)
    for found in running.seen:
        assert found.wait(60), "a process outlived the supervisor"
    shown = running.run("status")
    assert shown.returncode == 3
    assert "killed" in shown.stdout
    running.up()
    assert quick_test(running)[:1] == ["ok"]


def test_down_stops_everything_and_streams_survive_until_the_next_up(running: Stack) -> None:
    token = running.token()
    with running.client(token) as client:
        client.put("/v1/stream/kept", content=b"still here", headers={"Content-Type": "text/plain"})
    running.note()
    assert running.run("down").returncode == 0
    assert not running.left_over()
    assert running.run("status").returncode == 3
    assert running.run("down").returncode == 0
    running.up()
    with running.client(token) as client:
        assert client.get("/v1/stream/kept").content == b"still here"


def test_ctrl_c_stops_everything(tmp_path: Path) -> None:
    with stack(tmp_path) as made:
        process = subprocess.Popen(
            made.command("up"), cwd=tmp_path, env=made.environment, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        shown = []
        for line in process.stderr:
            shown.append(line)
            if "the stack is up" in line:
                break
        made.note()
        assert len(made.seen) == 3
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, shown
        assert "the stack is down" in process.stderr.read()
        process.stderr.close()
        assert not made.left_over()


def test_port_in_use_is_reported_with_its_process(tmp_path: Path, running: Stack) -> None:
    with stack(tmp_path, DS_PROXY__PORT=str(running.ports["proxy"])) as made:
        for arguments in (("up",), ("up", "--detach")):
            done = made.run(*arguments)
            assert done.returncode == 1
            assert re.search(
                rf"port {running.ports['proxy']} \(envoy\) is used by .*envoy.* \(process \d+\).*\(DS_PROXY__PORT\)",
                done.stderr,
            )


def test_nodes_and_workers_exclude_each_other(tmp_path: Path) -> None:
    with stack(tmp_path) as made:
        done = made.run("up", "--nodes", "3", "--workers", "2")
    assert done.returncode == 2
    assert "--workers does not work with --nodes" in done.stderr


def test_server_port_0_is_rejected(tmp_path: Path) -> None:
    with stack(tmp_path, DS_SERVER__PORT="0") as made:
        done = made.run("up")
        assert done.returncode == 2
        assert "server.port is 0" in done.stderr
