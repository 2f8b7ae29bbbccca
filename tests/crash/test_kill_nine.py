"""Kill the real server with SIGKILL under load, many times on one data directory, and check every guarantee.

In each round the server is killed at a random moment, sometimes during recovery, and restarted. The clients are not
informed: producers retry, readers resume, and forks, deletions and subscriptions continue. Each client records what the
server guaranteed (see `workload`); the first violation ends the run and reports the seed and the round.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from headwater.storage.offline.check import check
from tests.crash import stream_clients, stream_lifecycles
from tests.crash.faults import FAULTS
from tests.crash.killable_server import KillableServer
from tests.crash.subscription_workload import SubscriptionWorkload
from tests.crash.workload import Violation, Workload
from tests.ports import free_port

ROUNDS = 8
ROUNDS_LONG = 500
UP_S = (0.005, 0.2)
ANSWERS = 150
"""So many requests are answered before a kill, if the clients are behind."""
ANSWERS_TIMEOUT_S = 120.0
CHECK_EVERY = 25

MODES = ["file-durable", "acid", "file-fast"]
BROKEN = {fault: "acid" if fault == "applies_only_some" else "file-durable" for fault in FAULTS}
BROKEN_ROUNDS = {"forgets_wakes": 8}
"""This fault is found only at the end, by work that is never acked; the others are found during the rounds."""


def clients(workload: Workload) -> list[Coroutine[Any, Any, None]]:
    """All clients except the subscription's."""
    paths = [f"/v1/stream/histories/{number}" for number in range(3)]
    tasks: list[Coroutine[Any, Any, None]] = []
    for number, path in enumerate(paths):
        tasks += [
            stream_clients.produce(workload, path, f"p{number}"),
            stream_clients.produce(workload, path, f"q{number}"),
        ]
        tasks += [stream_clients.write(workload, path, f"w{number}"), stream_clients.watch(workload, path)]
        tasks += [
            stream_clients.catch_up(workload, path),
            stream_clients.poll(workload, path),
            stream_clients.listen(workload, path),
        ]
    tasks += [stream_lifecycles.recreate_repeatedly(workload, f"/v1/stream/lifecycles/{number}") for number in range(2)]
    tasks += [stream_lifecycles.fork_repeatedly(workload, f"/v1/stream/forks/{number}") for number in range(2)]
    return tasks


async def create_streams(workload: Workload) -> None:
    client = workload.client()
    for number in range(3):
        path = f"/v1/stream/histories/{number}"
        await workload.request_until_answered(client, "PUT", path, {"Content-Type": "text/plain"}, b"", {200, 201})
        workload.history(path)


def is_covered(counts: Counter[str], rounds: int) -> bool:
    """Whether the clients did enough between the kills for a run of this many rounds to be meaningful."""
    at_least = {"produced": 2 * rounds, "written": rounds / 2, "lifecycles": rounds / 10, "work appended": rounds / 2}
    at_least |= {"lost": rounds / 2, "fork trees": 3, "acks": 3}
    return all(counts[what] > number for what, number in at_least.items())


async def let_clients_work(workload: Workload, rounds: int) -> None:
    """Wait for answers if the clients have not done enough for so many rounds, as on a busy machine."""
    enough = workload.counts["answered"] + ANSWERS
    async with asyncio.timeout(ANSWERS_TIMEOUT_S):
        while not is_covered(workload.counts, rounds) and workload.counts["answered"] < enough:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def kill_repeatedly(server: KillableServer, workload: Workload, rounds: int, rounds_max: int) -> None:
    """Kill the server in each round; on a slow machine, add rounds until the clients have done enough."""
    rng = workload.rng
    for number in range(rounds_max):
        if number >= rounds and is_covered(workload.counts, rounds):
            return
        workload.counts["rounds"] += 1
        if number % 2:
            await let_clients_work(workload, number)
        await asyncio.sleep(rng.uniform(*UP_S))
        await server.kill()
        while rng.random() < 0.15:
            # Kill it again during startup: before, during or just after recovery.
            await server.start()
            await asyncio.sleep(rng.uniform(0.0, 0.08))
            await server.kill()
            workload.counts["killed in recovery"] += 1
        await server.start(new_interpreter=number % 25 == 24)
        await server.wait_until_listening()
        if number % CHECK_EVERY == CHECK_EVERY - 1:
            await stream_clients.check_contents(workload)


async def run_rounds(
    home: Path,
    mode: str,
    rounds: int,
    seed: int,
    fault: str | None = None,
    timeout_s: float = 120.0,
    extension: int = 1,
) -> Workload:
    """Run the clients through `rounds` kills, or up to `extension` times as many until the run is meaningful."""
    rng = random.Random(seed)
    server = KillableServer(home, mode, free_port(), fault)
    workload = Workload(server.port, rng)
    await server.open()
    try:
        await server.start()
        await server.wait_until_listening()
        await create_streams(workload)
        subscription = SubscriptionWorkload(workload, streams=3)
        await subscription.set_up()
        async with asyncio.TaskGroup() as group:
            for client in (*clients(workload), subscription.append_work()):
                group.create_task(client)
            worker = group.create_task(subscription.run_worker())
            await kill_repeatedly(server, workload, rounds, rounds * extension)
            workload.running = False
            await subscription.wait_until_all_acked(timeout_s)
            await worker
        await stream_clients.check_contents(workload)
        await server.stop()
        problems = list(check(server.data))
        if problems:
            raise Violation(f"the offline check found {problems[:3]}")
        await server.start()
        await server.wait_until_listening()
        await stream_clients.check_contents(workload)
        await server.kill()
    except BaseExceptionGroup as group:
        violation = next((each for each in group.exceptions if isinstance(each, Violation)), None)
        if violation is None:
            raise
        violation.add_note(f"mode {mode}, seed {seed}, round {workload.counts['rounds']}")
        raise violation from None
    finally:
        await workload.close()
        await server.close()
    return workload


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", MODES)
def test_guarantees_hold_after_kill_nine(tmp_path: Path, mode: str, long: bool) -> None:
    rounds = ROUNDS_LONG if long else ROUNDS
    seed = time.time_ns() % 10**9 if long else 20_261
    counts = asyncio.run(run_rounds(tmp_path, mode, rounds, seed, extension=10)).counts
    assert counts["rounds"] >= rounds
    assert is_covered(counts, rounds), f"the clients did too little: {counts}"


async def search_violation(home: Path, mode: str, fault: str) -> None:
    """Run with several seeds: whether a kill hits a moment that shows a fault depends on the speed of the machine."""
    for seed in range(7, 17):
        (home / str(seed)).mkdir()
        await run_rounds(home / str(seed), mode, BROKEN_ROUNDS.get(fault, 60), seed, fault, timeout_s=8.0)


@pytest.mark.long
@pytest.mark.parametrize(("fault", "mode"), BROKEN.items(), ids=BROKEN.keys())
def test_broken_server_is_detected(tmp_path: Path, fault: str, mode: str) -> None:
    with pytest.raises(Violation):
        asyncio.run(search_violation(tmp_path, mode, fault))
