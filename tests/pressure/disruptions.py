"""Disruptions of a server while its clients' history is logged: kills, stops, cut connections, disk errors.

    python -m tests.pressure.disruptions --mode acid --rounds 50 --seed 7

After each disruption the server works again, so that any sequence of them is possible. After the last one the history
is checked; the seed determines the disruptions and the clients' requests, but not the timing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from headwater.storage.offline.check import check as check_directory
from tests.crash.killable_server import KillableServer
from tests.crash.subscription_workload import SubscriptionWorkload
from tests.crash.workload import Violation
from tests.ports import free_port
from tests.pressure import clients
from tests.pressure.clients import Fleet, FleetWorkload
from tests.pressure.history import check

CALM_S = (0.05, 0.3)
DAY_S = 86_400.0
ALL_ACKED_S = 60.0
"""How long after the last disruption all work of the subscription must be acked."""
ACKS_MIN = 5
"""With fewer acks, a run says nothing about the subscription: it continues without disruptions."""
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class Scene:
    """One server and its clients."""

    def __init__(self, server: KillableServer, fleet: Fleet) -> None:
        self.server = server
        self.fleet = fleet
        self.dice = fleet.dice

    async def wait(self, low: float, high: float) -> None:
        await asyncio.sleep(self.dice.uniform(low, high))

    async def restart(self, *, clock_ahead_s: float = 0.0) -> None:
        await self.server.kill()
        await self.server.start(clock_ahead_s=clock_ahead_s)
        await self.server.wait_until_listening()


async def kill(scene: Scene) -> None:
    """kill -9 at a random time."""
    await scene.restart()


async def stop(scene: Scene) -> None:
    """SIGSTOP for a while: the server neither responds nor exits."""
    os.kill(scene.server.pid, signal.SIGSTOP)
    try:
        await scene.wait(0.05, 0.8)
    finally:
        os.kill(scene.server.pid, signal.SIGCONT)


async def cut(scene: Scene) -> None:
    """Break all connections, several times."""
    for _ in range(4):
        scene.fleet.cut()
        await scene.wait(0.0, 0.1)


async def clock(scene: Scene) -> None:
    """Restart the server with a clock that is days off, then with the correct one."""
    await scene.restart(clock_ahead_s=scene.dice.choice((-2, -0.1, 0.1, 40)) * DAY_S)
    await scene.wait(0.1, 0.3)
    await scene.restart()


async def descriptors(scene: Scene) -> None:
    """EMFILE: no new file and no new connection."""
    pid = scene.server.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - at once, in memory
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, before[1]))
    await scene.wait(0.2, 0.6)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    await scene.wait(0.1, 0.3)
    await scene.restart()


async def full(scene: Scene) -> None:
    """Files cannot grow: a write is cut short and then fails, as on a full disk."""
    pid = scene.server.pid
    largest = max((path.stat().st_size for path in scene.server.data.rglob("*") if path.is_file()), default=0)
    limit = min(largest, 1 << 20) + 2_000
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    await scene.wait(0.2, 0.5)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, UNLIMITED)
    await scene.restart()


def _worker(scene: Scene) -> int | None:
    """A random worker process, if there is one."""
    workers = psutil.Process(scene.server.pid).children()
    return scene.dice.choice(workers).pid if workers else None


async def kill_worker(scene: Scene) -> None:
    """kill -9 of one worker; the supervisor restarts it."""
    pid = _worker(scene)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    await scene.wait(0.0, 0.5)


async def stop_worker(scene: Scene) -> None:
    """SIGSTOP of one worker, until it continues or is killed because it does not respond."""
    pid = _worker(scene)
    if pid is None:
        return
    os.kill(pid, signal.SIGSTOP)
    await scene.wait(0.05, 2.5)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


async def _inject(scene: Scene, what: str, low: float, high: float) -> None:
    """Use strace to change the behaviour of system calls of the running server."""
    strace = shutil.which("strace")
    assert strace is not None, "strace is missing; on Debian: apt-get install strace"
    calls = what.partition(":")[0]
    tracer = await asyncio.create_subprocess_exec(
        strace,
        *("-f", "-qq", "-o", os.devnull, "-e", f"trace={calls}", "-e", f"inject={what}"),
        *("-p", str(scene.server.pid)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await scene.wait(low, high)
    finally:
        if tracer.returncode is None:
            tracer.send_signal(signal.SIGINT)
        await tracer.wait()


async def slow_disk(scene: Scene) -> None:
    """Every sync takes 40 ms longer."""
    await _inject(scene, "fdatasync,fsync,msync:delay_enter=40000", 0.4, 0.9)


async def failing_disk(scene: Scene) -> None:
    """A sync fails with EIO: nothing is acknowledged after it until the server is restarted."""
    await _inject(scene, f"fdatasync,fsync:error=EIO:when={scene.dice.randrange(1, 6)}+7", 0.3, 0.6)
    await scene.restart()


async def no_space(scene: Scene) -> None:
    """A sync fails with ENOSPC, as on a file system with delayed allocation."""
    await _inject(scene, f"fdatasync,fsync:error=ENOSPC:when={scene.dice.randrange(1, 6)}+5", 0.3, 0.6)
    await scene.restart()


Disruption = Callable[[Scene], Awaitable[None]]
DISRUPTIONS: dict[str, Disruption] = {
    disruption.__name__: disruption
    for disruption in (kill, stop, cut, clock, descriptors, full, slow_disk, failing_disk, no_space)
}


OF_WORKERS: dict[str, Disruption] = {disruption.__name__: disruption for disruption in (kill_worker, stop_worker)}
"""Disruptions of a server with several workers."""


async def run_disruptions(
    home: Path,
    mode: str,
    disruptions: list[str],
    seed: int,
    *,
    workers: int = 1,
    fault: str | None = None,
    calm_s: tuple[float, float] = CALM_S,
) -> Counter[str]:
    """Run the clients during these disruptions, then check their history."""
    dice = random.Random(seed)
    server = KillableServer(home, mode, free_port(), fault, workers)
    fleet = Fleet([f"http://127.0.0.1:{server.port}"], dice)
    scene = Scene(server, fleet)
    workload = FleetWorkload(fleet)
    # Not with the other disruptions: a lease of a server whose clock was 40 days ahead ends in 40 days.
    subscription = SubscriptionWorkload(workload, streams=3) if workers > 1 else None
    done: list[str] = []
    await server.open()
    try:
        await server.start()
        await server.wait_until_listening()
        await clients.set_up(fleet)
        running = clients.everybody(fleet)
        if subscription is not None:
            await subscription.set_up()
            running += [subscription.append_work(), subscription.run_worker()]
        async with asyncio.TaskGroup() as group:
            for client in running:
                group.create_task(client)
            for name in disruptions:
                await scene.wait(*calm_s)
                done.append(name)
                await (DISRUPTIONS | OF_WORKERS)[name](scene)
            await scene.wait(*calm_s)
            deadline_s = time.monotonic() + ALL_ACKED_S
            while subscription is not None and workload.counts["acks"] <= ACKS_MIN and time.monotonic() < deadline_s:
                await scene.wait(*calm_s)
            fleet.running = workload.running = False
            if subscription is not None:
                await subscription.wait_until_all_acked(ALL_ACKED_S)
        content = {path: await clients.content(fleet, path) for path in fleet.kept}
        judged = check(fleet.history, content)
        workers_left = psutil.Process(server.pid).children()
        await server.kill()
        await asyncio.to_thread(psutil.wait_procs, workers_left, 30)
        if problems := list(check_directory(server.data)):
            raise Violation(f"the data directory is damaged: {problems[:3]}")
    except BaseException as error:
        while isinstance(error, BaseExceptionGroup):
            error = next((each for each in error.exceptions if isinstance(each, Violation)), error.exceptions[0])
        error.add_note(f"mode {mode}, seed {seed}, disruptions {done}; the server's log ends:\n{server.log_tail()}")
        raise error from None
    finally:
        await fleet.close()
        await server.close()
    return judged + fleet.counts + workload.counts + Counter(disruptions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="file-durable")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    parser.add_argument("--only", choices=DISRUPTIONS | OF_WORKERS)
    parser.add_argument("--workers", type=int, default=1)
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)  # noqa: T201 - needed to replay, also after a crash
    # Faults injected into the supervisor would not reach the workers.
    of_workers = [*OF_WORKERS, "kill", "cut"]
    names = [chosen.only] if chosen.only else of_workers if chosen.workers > 1 else list(DISRUPTIONS)
    disruptions = random.Random(chosen.seed).choices(names, k=chosen.rounds)
    with tempfile.TemporaryDirectory() as directory:
        run = run_disruptions(Path(directory), chosen.mode, disruptions, chosen.seed, workers=chosen.workers)
        counts: dict[str, Any] = dict(asyncio.run(run))
    print(json.dumps(counts))  # noqa: T201


if __name__ == "__main__":
    main()
