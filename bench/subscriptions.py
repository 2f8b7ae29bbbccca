"""The cost of subscriptions: appends to and creations of streams that none, some or many of them follow.

Everything runs in this process, on the engine with its memory store, and CPU time is measured, so that the results do
not depend on a network or on other load. All cases have the same streams; rounds alternate between them, and only the
ratios to the case without subscriptions are meaningful.

    python -m bench.subscriptions                  500 subscriptions over 100,000 streams
    python -m bench.subscriptions --streams 20000 --subscriptions 1000
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from headwater.core.rules import CreateRequest
from headwater.core.subscriptions import make_config
from headwater.engine.clock import SteadyClock
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.scheduler import Timer
from headwater.engine.subscriptions import Subscriptions
from headwater.engine.webhooks import Compose, OnAnswer, OnVetted
from headwater.storage.memory import MemoryStorage

TEXT = "text/plain"
BODY = b"x" * 100
HOT = 50
"""Streams that a round appends to in turn."""


class _Never:
    def cancel(self) -> None: ...


class Ticks:
    """A scheduler whose ticks are run by the benchmark. Nothing here waits for a timer."""

    def __init__(self) -> None:
        self._soon: deque[Callable[[], None]] = deque()

    def soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return _Never()

    def on_thread(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        raise AssertionError("memory needs no thread")

    def timer_s(self) -> float:
        return time.perf_counter()

    def close(self) -> None: ...

    def tick(self) -> None:
        while self._soon:
            self._soon.popleft()()


class NoNetwork:
    def vet(self, url: str, done: OnVetted) -> None:
        done(None)

    def call(self, url: str, compose: Compose, timeout_s: float, done: OnAnswer) -> None:
        raise AssertionError("no webhook is called here")

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Patterns:
    """The subscriptions of a case: what each of them follows."""

    name: str
    of: Callable[[int], str]
    count: int


class Case:
    def __init__(self, patterns: Patterns) -> None:
        self.name = patterns.name
        self.ticks = Ticks()
        self.engine = Engine(MemoryStorage(), SteadyClock(), self.ticks, EngineLimits())
        self.engine.start()
        self.subscriptions = Subscriptions(self.engine, self.ticks, NoNetwork(), timeout_s=30)
        self.subscriptions.start()
        self.subscriptions.begin()
        for number in range(patterns.count):
            config = make_config("pull-wake", patterns.of(number), (), None, f"wake/{number}", 600_000, None, 1024)
            self.subscriptions.put(f"s{number}", config, "", _must)
        self.append_ns: list[float] = []
        self.create_ns = 0.0

    def create(self, names: list[str]) -> None:
        engine = self.engine
        requests = [CreateRequest(name, TEXT, None, None, False, b"") for name in names]
        began = time.process_time_ns()
        for request in requests:
            engine.create(request, _must)
        self.ticks.tick()
        self.create_ns = (time.process_time_ns() - began) / len(names)

    def round(self, names: list[str], appends: int) -> None:
        append = self.engine.append
        began = time.process_time_ns()
        for number in range(appends):
            append(names[number % HOT], TEXT, BODY, None, None, False, _must)
            self.ticks.tick()
        self.append_ns.append((time.process_time_ns() - began) / appends)


def _must(result: object) -> None:
    if isinstance(result, Exception):
        raise result


def link_time_s(case: Case, pattern: str) -> tuple[float, int]:
    """How long it takes to create a subscription that follows all streams."""
    config = make_config("pull-wake", pattern, (), None, "wake/all", 600_000, None, 1024)
    began = time.process_time()
    case.subscriptions.put("all", config, "", _must)
    case.ticks.tick()
    took_s = time.process_time() - began
    linked = len(case.subscriptions._by_id["all"].links)
    case.subscriptions.delete("all")
    return took_s, linked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=100_000)
    parser.add_argument("--subscriptions", type=int, default=500)
    parser.add_argument("--appends", type=int, default=20_000, help="appends in one round")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    count = options.subscriptions
    # Each subscription would log once that its webhook is unreachable.
    logging.getLogger("headwater.subscriptions").setLevel(logging.ERROR)

    cases = [
        Case(Patterns("no subscription", str, 0)),
        Case(Patterns(f"{count}, none matches", lambda number: f"elsewhere/{number}/**", count)),
        Case(Patterns(f"{count}, one matches each stream", lambda number: f"events/{number}/*", count)),
        Case(Patterns("1 that matches everything", lambda _: "**", 1)),
    ]
    names = [f"events/{number % count}/{number}" for number in range(options.streams)]
    for case in cases:
        gc.collect()
        gc.freeze()
        case.create(names)
    crowd = Case(Patterns(f"{count}, all match the same {HOT} streams", lambda _: "events/*/*", count))
    crowd.create(names[:HOT])
    cases.append(crowd)

    gc.collect()
    gc.freeze()
    for _ in range(options.rounds):
        for case in cases:
            case.round(names, options.appends)

    print(f"{options.streams} streams; {options.rounds} rounds of {options.appends} appends of {len(BODY)} bytes\n")
    print(f"{'subscriptions':42} {'append':>10} {'ratio':>7} {'create':>10} {'ratio':>7}")
    plain = cases[0]
    for case in cases:
        # Consecutive rounds had the same conditions, so their ratio excludes other load.
        pairs = zip(case.append_ns, plain.append_ns, strict=True)
        ratio = statistics.median(own / other for own, other in pairs)
        append_us = statistics.median(case.append_ns) / 1000
        print(
            f"{case.name:42} {append_us:7.2f} us {ratio:7.2f}"
            f" {case.create_ns / 1000:7.2f} us {case.create_ns / plain.create_ns:7.2f}"
        )
    took_s, linked = link_time_s(plain, "**")
    print(
        f"\na new subscription to all of {linked} streams: {took_s * 1e3:.0f} ms ({took_s / linked * 1e6:.1f} us each)"
    )


if __name__ == "__main__":
    main()
