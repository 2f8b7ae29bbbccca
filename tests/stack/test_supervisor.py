"""The supervisor with small services: order, readiness, restart delays, failed starts, no processes left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from headwater.config import StackSettings
from headwater.stack.processes import ProcessIdentity, can_bind, identity_of, port_user
from headwater.stack.services import Service, UnavailableService, no_probe
from headwater.stack.state import StackDirectory, StackRunningError, StackStatus, current_status
from headwater.stack.supervisor import StackStartError, Supervisor, stop_leftovers
from tests.ports import free_port
from tests.serving import server_environment
from tests.waiting import wait_until

READY = no_probe()
SLEEP = "import time; time.sleep(600)"


def part(name: str, script: str, probe: Callable[[], str] = READY, port: int | None = None) -> Service:
    return Service(name, (sys.executable, "-c", script), probe, port)


def never(status: StackStatus) -> bool:
    return False


def exists(path: Path) -> Callable[[], str]:
    return lambda: "" if path.exists() else f"{path.name} is not there"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StackDirectory]:
    found = StackDirectory(tmp_path)
    found.acquire()
    yield found
    found.release()


class Watch:
    """Receives every published state, and stops the supervisor when a condition holds."""

    def __init__(self, enough: Callable[[StackStatus], bool]) -> None:
        self.states: list[tuple[str, str]] = []
        self.pids: set[ProcessIdentity] = set()
        self._enough = enough

    def __call__(self, status: StackStatus) -> None:
        for one in status.parts:
            if not self.states or (one.name, one.state) not in self.states[-len(status.parts) :]:
                self.states.append((one.name, one.state))
            if one.pid:
                self.pids.add(one.identity)
        if status.phase in {"starting", "up"} and self._enough(status):
            os.kill(os.getpid(), signal.SIGTERM)


def supervise(
    directory: StackDirectory,
    parts: list[Service | UnavailableService],
    enough: Callable[[StackStatus], bool],
    **settings: float,
) -> tuple[Supervisor, Watch]:
    watch = Watch(enough)
    supervisor = Supervisor(
        directory,
        parts,
        StackSettings(**settings),
        profile="test",
        show=watch,
    )
    return supervisor, watch


def test_services_start_in_order_after_the_previous_is_ready_and_stop_in_reverse(
    directory: StackDirectory, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    events = tmp_path / "events"
    script = (
        "import pathlib, signal, sys, time\n"
        f"events = pathlib.Path({str(events)!r})\n"
        "name = {name!r}\n"
        "def end(*_):\n"
        "    events.open('a').write(f'-{{name}} ')\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "events.open('a').write(f'+{{name}} ')\n"
        "time.sleep({wait})\n"
        f"pathlib.Path({str(ready)!r} + name).touch()\n"
        "time.sleep(600)\n"
    )
    parts: list[Service | UnavailableService] = [
        part(name, script.format(name=name, wait=wait), exists(Path(f"{ready}{name}")))
        for name, wait in (("a", 0.5), ("b", 0.1), ("c", 0))
    ]
    parts.append(UnavailableService("d", "not here"))
    supervisor, watch = supervise(directory, parts, lambda status: status.phase == "up")
    supervisor.run()
    assert events.read_text().split() == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert supervisor.status.phase == "stopped"
    assert [one.state for one in supervisor.status.parts] == ["stopped", "stopped", "stopped", "absent"]
    assert not [identity for identity in watch.pids if identity.is_alive]


def test_crashed_service_is_restarted_with_growing_delays(directory: StackDirectory, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    script = f"import time; open({str(starts)!r}, 'a').write(f'{{time.time()}} '); time.sleep(0.05)"
    supervisor, watch = supervise(
        directory, [part("crasher", script)], lambda status: status.parts[0].restarts >= 4, restart_delay_secs=0.2
    )
    supervisor.run()
    moments = [float(moment) for moment in starts.read_text().split()]
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert len(gaps) == 3
    assert gaps[0] > 0.2
    assert gaps[1] > 0.4
    assert gaps[2] > 0.8
    assert ("crasher", "restarting") in watch.states


def test_startup_fails_with_the_end_of_the_log_of_a_failing_service(directory: StackDirectory) -> None:
    script = "print('the disk is on fire', flush=True); raise SystemExit(7)"
    broken = part("broken", script, lambda: "not ready")
    supervisor, watch = supervise(directory, [part("fine", SLEEP), broken], never, restart_delay_secs=0.05)
    with pytest.raises(StackStartError, match=r"(?s)broken exited with code 7.*on fire") as failed:
        supervisor.run()
    assert str(failed.value).count("on fire") == 1, "only of the last start"
    assert supervisor.status.phase == "failed"
    assert not [identity for identity in watch.pids if identity.is_alive]


def test_startup_fails_if_a_service_never_becomes_ready(directory: StackDirectory) -> None:
    slow = part("slow", SLEEP, lambda: "its port is closed")
    supervisor, _ = supervise(directory, [slow], never, restart_delay_secs=0.05, start_timeout_secs=0.2)
    with pytest.raises(StackStartError, match=r"not ready within 0\.2 s: its port is closed"):
        supervisor.run()


def test_service_that_does_not_stop_is_killed_with_its_children(directory: StackDirectory, tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = (
        "import pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"own = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(own.pid))\n"
        "time.sleep(600)\n"
    )
    pids: list[ProcessIdentity] = []

    def enough(status: StackStatus) -> bool:
        if status.phase == "up":
            pids.append(identity_of(int(child.read_text())))
        return status.phase == "up"

    supervisor, watch = supervise(
        directory,
        [part("stubborn", script, lambda: "" if child.exists() and child.read_text() else "not yet")],
        enough,
        stop_timeout_secs=0.3,
    )
    supervisor.run()
    assert pids
    assert pids[0].wait(60)
    assert not [identity for identity in watch.pids if identity.is_alive]


def test_service_that_stops_responding_is_shown_as_not_ready(directory: StackDirectory) -> None:
    answers = iter(["", "gone quiet", "gone quiet"])
    supervisor, watch = supervise(
        directory,
        [part("quiet", SLEEP, lambda: next(answers, "gone quiet"))],
        lambda status: status.parts[0].state == "unready",
    )
    supervisor.run()
    assert ("quiet", "unready") in watch.states


def test_ports_in_use_are_reported_with_their_process(directory: StackDirectory) -> None:
    port = free_port()
    script = (
        f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); print('x', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert not can_bind("127.0.0.1", port)
        supervisor, _ = supervise(directory, [part("door", SLEEP, port=port)], never)
        with pytest.raises(
            StackStartError, match=rf"port {port} \(door\) is used by python\S* -c import.*\(process {holder.pid}\)"
        ):
            supervisor.check_ports()
    finally:
        holder.kill()
        holder.communicate()
    assert can_bind("127.0.0.1", port)
    assert "unknown process" in port_user(port)


def test_services_exit_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from headwater.config import StackSettings\n"
        "from headwater.stack.services import Service, no_probe\n"
        "from headwater.stack.state import StackDirectory\n"
        "from headwater.stack.supervisor import Supervisor\n"
        f"directory = StackDirectory(Path({str(tmp_path)!r}))\n"
        "directory.acquire()\n"
        f"part = Service('long', (sys.executable, '-c', {SLEEP!r}), no_probe())\n"
        "Supervisor(directory, [part], StackSettings(), profile='test', show=lambda status: None).run()\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", script], env=server_environment())
    directory = StackDirectory(tmp_path)
    try:
        status = wait_until(directory.read, lambda found: found is not None and found.phase == "up")
        assert status is not None
        long = status.parts[0].identity
        assert long.is_alive
        with pytest.raises(StackRunningError, match="already runs"):
            StackDirectory(tmp_path).acquire()
    finally:
        supervisor.kill()
        supervisor.wait()
    assert long.wait(60), "a service outlived its supervisor"
    truth = current_status(directory)
    assert truth is not None
    assert (truth.phase, truth.parts[0].state) == ("failed", "failed")
    assert not directory.is_supervised


def test_only_leftover_processes_of_a_killed_supervisor_are_stopped(directory: StackDirectory) -> None:
    ours, theirs = (subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True) for _ in range(2))
    reaper = threading.Thread(target=ours.wait)
    reaper.start()
    try:
        supervisor, _ = supervise(directory, [part("a", SLEEP), part("b", SLEEP)], never)
        one, other = supervisor.status.parts
        identity = identity_of(ours.pid)
        one.pid, one.started = identity.pid, identity.started
        # The same id with another start time: an unrelated process.
        other.pid, other.started = theirs.pid, identity_of(theirs.pid).started - 1
        directory.write(supervisor.status)
        assert stop_leftovers(directory, 5) == ["a"]
        reaper.join(60)
        assert ours.poll() is not None
        assert theirs.poll() is None
    finally:
        for process in (ours, theirs):
            process.kill()
        theirs.wait()
        reaper.join(60)
