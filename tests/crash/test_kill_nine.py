"""kill -9 of the real server under load, over and over on one directory, and what its clients may then not see.

Round by round the server is killed at a random moment, also while it recovers, and started again. Nobody tells its
clients: producers retry, readers resume, forks and deletions and subscriptions go on. Each of them knows what it was
promised (see `world`); the first broken promise ends the run and names seed and round.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from headwater.storage.offline.check import check
from tests.crash import journals, lives
from tests.crash.crew import Crew
from tests.crash.faults import FAULTS
from tests.crash.victim import Victim
from tests.crash.world import Violation, World
from tests.ports import free_port

ROUNDS = 100
ROUNDS_LONG = 500
UP_S = (0.005, 0.2)
JUDGED_EVERY = 25

MODES = ["file-durable", "acid", "file-fast"]
BROKEN = {fault: "acid" if fault == "applies_only_some" else "file-durable" for fault in FAULTS}
BROKEN_ROUNDS = {"forgets_wakes": 8}
"""Told apart only at the end, by work that nobody does; the others are found out on the way."""


def clients(world: World) -> list[Coroutine[Any, Any, None]]:
    """Everybody but the crew."""
    paths = [f"/v1/stream/journals/{number}" for number in range(3)]
    everybody: list[Coroutine[Any, Any, None]] = []
    for number, path in enumerate(paths):
        everybody += [journals.produce(world, path, f"p{number}"), journals.produce(world, path, f"q{number}")]
        everybody += [journals.write(world, path, f"w{number}"), journals.watch(world, path)]
        everybody += [journals.catch_up(world, path), journals.poll(world, path), journals.listen(world, path)]
    everybody += [lives.live_and_die(world, f"/v1/stream/lives/{number}") for number in range(2)]
    everybody += [lives.branch(world, f"/v1/stream/forks/{number}") for number in range(2)]
    return everybody


async def create_journals(world: World) -> None:
    client = world.client()
    for number in range(3):
        path = f"/v1/stream/journals/{number}"
        await world.insist(client, "PUT", path, {"Content-Type": "text/plain"}, b"", {200, 201})
        world.journal(path)


async def kill_over_and_over(victim: Victim, world: World, rounds: int) -> None:
    dice = world.dice
    for number in range(rounds):
        world.counts["rounds"] += 1
        await asyncio.sleep(dice.uniform(*UP_S))
        await victim.kill()
        while dice.random() < 0.15:
            # Again, somewhere in its start: before, in, or just after recovery.
            await victim.start()
            await asyncio.sleep(dice.uniform(0.0, 0.08))
            await victim.kill()
            world.counts["killed in recovery"] += 1
        await victim.start(anew=number % 25 == 24)
        await victim.wait_until_listening()
        if number % JUDGED_EVERY == JUDGED_EVERY - 1:
            await journals.judge(world)


async def survive(
    home: Path, mode: str, rounds: int, seed: int, fault: str | None = None, patience_s: float = 30.0
) -> World:
    dice = random.Random(seed)
    victim = Victim(home, mode, free_port(), fault)
    world = World(victim.port, dice)
    await victim.open()
    try:
        await victim.start()
        await victim.wait_until_listening()
        await create_journals(world)
        crew = Crew(world, streams=3)
        await crew.set_up()
        async with asyncio.TaskGroup() as group:
            for client in (*clients(world), crew.order()):
                group.create_task(client)
            worker = group.create_task(crew.work())
            await kill_over_and_over(victim, world, rounds)
            world.running = False
            await crew.finish(patience_s)
            await worker
        await journals.judge(world)
        await victim.stop()
        problems = list(check(victim.data))
        if problems:
            raise Violation(f"after it all, the check finds {problems[:3]}")
        await victim.start()
        await victim.wait_until_listening()
        await journals.judge(world)
        await victim.kill()
    except BaseExceptionGroup as group:
        violation = next((each for each in group.exceptions if isinstance(each, Violation)), None)
        if violation is None:
            raise
        violation.add_note(f"mode {mode}, seed {seed}, round {world.counts['rounds']}")
        raise violation from None
    finally:
        await world.close()
        await victim.close()
    return world


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", MODES)
def test_what_was_promised_survives_kill_nine(tmp_path: Path, mode: str, long: bool) -> None:
    rounds = ROUNDS_LONG if long else ROUNDS
    seed = time.time_ns() % 10**9 if long else 20_261
    counts = asyncio.run(survive(tmp_path, mode, rounds, seed)).counts
    assert counts["rounds"] == rounds
    for what, at_least in {"produced": 20, "written": 5, "lives": 1, "ordered": 5}.items():
        assert counts[what] > at_least * rounds / 10, f"too little {what} to judge by: {counts}"
    assert counts["lost"] > rounds / 2, f"the kills interrupted nobody: {counts}"
    assert counts["families"] > 3
    assert counts["acks"] > 3


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("fault", "mode"), BROKEN.items(), ids=BROKEN.keys())
def test_a_broken_server_is_found_out(tmp_path: Path, fault: str, mode: str) -> None:
    with pytest.raises(Violation):
        asyncio.run(survive(tmp_path, mode, BROKEN_ROUNDS.get(fault, 60), 7, fault, patience_s=8.0))
