"""A pipeline in every direction under continuous writes, with random failures of its processes.

SIGKILL is sent to drivers with all their processes, Spark's Python processes, the server and the database. A second
driver is started on the same checkpoints while the first one runs, or is suspended (SIGSTOP) and resumed later. Server,
database, checkpoints and archive are restored together from a backup. The trial acts as the supervisor and starts the
next driver.
"""

from __future__ import annotations

import logging
import random
import shutil
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import httpx

from tests.kills.drivers import Driver
from tests.kills.feeding import FOLDS, LAKE, Feeder, Written, set_up
from tests.kills.judging import ALL, Judge
from tests.kills.services import Services, services
from tests.waiting import wait_until

log = logging.getLogger("tests.kills")

READY_TIMEOUT_S = 150.0
"""After this time the failures start, even if the driver is not ready."""
FINISH_TIMEOUT_S = 900.0
SUSPENDED_S = {"suspended": (5.0, 45.0), "suspended long": (130.0, 150.0)}
"""How long a driver is suspended while another one uses its checkpoints: longer than Spark waits for a worker (10 s),
or longer than every timeout (a request is retried for 120 s, and a batch waits 60 s for the database)."""
KILLED = ("drivers", "workers", "servers", "databases")
CHANCES = {
    "workers": 0.24,
    "servers": 0.28,
    "databases": 0.28,
    "second drivers": 0.10,
    "suspended": 0.08,
    "suspended long": 0.02,
}
"""What can happen to a driver before it is killed."""
HAPPENED = ("drivers", *CHANCES, "backups", "restores", "not ready", "messages")

Counts = dict[str, int]


class Trial:
    """A trial; `counts` has the numbers of events so far."""

    def __init__(self, directory: Path, running: Services, rng: random.Random, directions: tuple[str, ...]) -> None:
        self._directory = directory
        self._services = running
        self._rng = rng
        self._directions = directions
        self._kept: Written | None = None
        self._epoch = 0
        self.counts: Counts = dict.fromkeys(HAPPENED, 0)
        (directory / "pipeline.toml").write_text(_settings(directory, running, directions))
        self._feeder = self._feed(set_up(running.url, running.postgres.url))

    @property
    def kills(self) -> int:
        return sum(self.counts[name] for name in KILLED)

    def round(self, happenings: Iterable[str]) -> None:
        """Run one driver, cause these events, and kill it."""
        driver = self._driver()
        try:
            self.counts["not ready"] += not driver.wait_until_ready(READY_TIMEOUT_S)
            for happening in happenings:
                time.sleep(self._rng.uniform(0.2, 3.0))
                match happening:
                    case "workers":
                        self.counts[happening] += driver.kill_workers(self._rng)
                    case "servers":
                        self._services.kill_server(self._rng.uniform(0.0, 1.0))
                        self.counts[happening] += 1
                    case "databases":
                        self._services.kill_postgres(self._rng.uniform(0.0, 1.0))
                        self.counts[happening] += 1
                    case _:
                        driver = self._second_driver(driver, happening)
        finally:
            self._kill(driver)

    def back_up_or_restore(self) -> None:
        """Back up everything, or restore everything from the last backup, while no driver runs."""
        places = [self._directory / name for name in ("checkpoints", "lake")]
        self._feeder.stop()
        if self._kept is None:
            self._services.back_up()
            for place in places:
                shutil.rmtree(_kept(place), ignore_errors=True)
                if place.exists():
                    shutil.copytree(place, _kept(place))
            self._kept = self._feeder.written.copy()
            self.counts["backups"] += 1
            self._feeder = self._feed(self._feeder.written)
        else:
            self._services.restore()
            for place in places:
                shutil.rmtree(place, ignore_errors=True)
                if _kept(place).exists():
                    shutil.move(_kept(place), place)
            self.counts["restores"] += 1
            self._feeder = self._feed(self._kept)
            self._kept = None

    def finish(self, what: str) -> None:
        """Stop writing, let a last driver deliver everything, and check the result."""
        self._feeder.stop()
        written = self._feeder.written
        with httpx.Client(timeout=60.0) as http:
            url, postgres = self._services.url, self._services.postgres.url
            judge = Judge(url, postgres, self._directory / "lake", http)
            driver = self._driver()

            def missing() -> str:
                nonlocal driver
                if driver.has_ended:
                    self._kill(driver)
                    driver = self._driver()
                return judge.missing(written, self._directions)

            try:
                wait_until(missing, lambda found: not found, what=what, limit_s=FINISH_TIMEOUT_S, every_s=1.0)
            finally:
                driver.kill()
            judge.judge(written, self._directions, what)
        self.counts["messages"] = sum(map(len, written.streams.values())) + len(written.changes)

    def close(self) -> None:
        with suppress(AssertionError):
            self._feeder.stop()

    def _second_driver(self, driver: Driver, happening: str) -> Driver:
        """Start another driver on the same checkpoints and kill the first one later; return the new one."""
        self.counts[happening] += 1
        if happening in SUSPENDED_S:
            driver.signal(signal.SIGSTOP)
        other = self._driver()
        try:
            self.counts["not ready"] += not other.wait_until_ready(READY_TIMEOUT_S / 2)
            if happening in SUSPENDED_S:
                time.sleep(self._rng.uniform(*SUSPENDED_S[happening]))
                driver.signal(signal.SIGCONT)
            time.sleep(self._rng.uniform(1.0, 8.0))
        except BaseException:
            other.kill()
            raise
        finally:
            self._kill(driver)
        return other

    def _driver(self) -> Driver:
        copies = {"HEADWATER_TEST_COPY": "1"} if "stream to stream" in self._directions else {}
        return Driver(self._directory, copies)

    def _feed(self, written: Written) -> Feeder:
        self._epoch += 1
        rng = random.Random(self._rng.random())
        feeder = Feeder(self._services.url, self._services.postgres.url, rng, written, self._epoch)
        feeder.start()
        return feeder

    def _kill(self, driver: Driver) -> None:
        driver.kill()
        self.counts["drivers"] += 1


def run_kills(directory: Path, kills: int, seed: int, directions: tuple[str, ...] = ALL) -> Counts:
    """Run a trial with at least this many kills; return the counts. Raises an assertion error if anything is lost,
    duplicated or stuck."""
    rng = random.Random(seed)
    with services(directory / "server") as running:
        trial = Trial(directory, running, rng, directions)
        try:
            rounds = 0
            while trial.kills < kills:
                count = min(rng.randrange(20, 40), max(4, kills // 5))
                trial.round(rng.choices(list(CHANCES), list(CHANCES.values()), k=count))
                rounds += 1
                log.info("round %d, seed %d: %s", rounds, seed, trial.counts)
                trial.back_up_or_restore()
            trial.finish(f"seed {seed}, {trial.counts}")
        except AssertionError as error:
            error.add_note((directory / "driver.log").read_text("utf-8", "replace")[-3000:])
            raise
        finally:
            trial.close()
    return {"kills": trial.kills, **trial.counts}


def _kept(place: Path) -> Path:
    return place.with_name(f"{place.name}-kept")


def _settings(directory: Path, running: Services, directions: tuple[str, ...]) -> str:
    parts = [
        f"""
[pipeline]
server = "{running.url}"
postgres = "{running.postgres.url}"
master = "local[2,4]"
spark = {{ "spark.local.dir" = "{directory}/scratch" }}
checkpoints = "{directory}/checkpoints"
probe = false
restart_wait_max = 5.0
"""
    ]
    jobs = {
        "stream to Postgres": """
[[to_postgres]]
name = "events"
streams = ["one", "two", "three"]
wait_max = 60.0
""",
        "Postgres to stream": """
[[from_postgres]]
name = "ledger"
tables = [{ table = "ledger", stream = "ledger", format = "changes" }]
""",
        "fold": f"""
[[fold]]
name = "fold"
bucket = "{FOLDS}"
table = "folds"
""",
        "archive": f"""
[[archive]]
name = "archive"
bucket = "{LAKE}"
lake = "{directory}/lake"
trim = "fold"
compact_every_s = 20.0
""",
    }
    return "".join(parts + [text for name, text in jobs.items() if name in directions])
