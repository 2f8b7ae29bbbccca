"""Flipped bits in stored files: reads return the right data or an error, never wrong bytes.

The flips are anywhere in the files of a store that was closed or has just crashed. LMDB may abort the process on an
invalid page (which also counts as an error), so the flips run in another process. Damage within the bytes of a stream
must be refused with the stream's name and position, and everything else must stay readable.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from headwater.storage.acid import pieces
from headwater.storage.interface import CorruptError
from headwater.storage.journaled_store import JournaledStorage
from headwater.storage.offline.check import check
from tests.storage.acid.bit_flipper import MAP_BYTES, digest
from tests.storage.acid.driver import Driver, messages_of, open_acid, open_lazy, save_all

META_BYTES = 160
LOUD_DEATHS = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV}


def fill(driver: Driver, tag: str, store: JournaledStorage, *, carried: bool) -> None:
    for number in range(12):
        stream = driver.catalog.by_name.get(f"stream-{number}") or driver.create(f"stream-{number}")
        known = (stream.producers or {}).get("someone")
        driver.append(
            stream,
            [f"{tag}-{number}-{part}".encode() * 9 for part in range(10)],
            producer=("someone", 0, known.seq + 1 if known else 0),
        )
        driver.document(f"key-{number}", tag.encode())
        if number % 4 == 0:
            driver.commit()
            if carried:
                save_all(store)
    driver.commit()


def make_store(home: Path, *, crashed: bool) -> None:
    """Build `store` and `expected`, with all records in the shards or with some in the journal only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", 600)
        _make_store(home, crashed=crashed)


def _make_store(home: Path, *, crashed: bool) -> None:
    origin = home / "origin"
    store = open_acid(origin, 2, MAP_BYTES, 1, save_after_s=0.0)
    driver = Driver([store])
    driver.recover(store)
    fill(driver, "one", store, carried=True)
    driver.delete(driver.catalog.by_name["stream-3"])
    fill(driver, "two", store, carried=True)
    store.close()
    if crashed:
        store = open_lazy(origin, 2, MAP_BYTES)
        driver = Driver([store])
        driver.recover(store)
        fill(driver, "three", store, carried=False)
        fill(driver, "four", store, carried=False)
        # As a server does after it has been idle for a second.
        assert store._journal is not None
        store._journal.mark_complete()
    shutil.copytree(origin, home / "store", ignore=shutil.ignore_patterns("LOCK", "lock.mdb"))
    if crashed:
        store.close()
    shutil.copytree(home / "store", home / "pristine")
    (home / "expected").write_text(digest(home / "pristine"))


@pytest.fixture(params=["closed", "crashed"])
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 600)
    make_store(tmp_path, crashed=request.param == "crashed")
    return tmp_path


def sizes(home: Path) -> dict[str, int]:
    store = home / "store"
    files = (*store.rglob("data.mdb"), *store.rglob("*.log"), store / "acid" / "checkpoint")
    return {str(path.relative_to(store)): path.stat().st_size for path in sorted(files) if path.stat().st_size}


def outcomes(home: Path, flips: list[tuple[str, int, int]], *mode: str) -> Counter[str]:
    """Return the outcome of each flip; if the process dies, another one continues after that flip."""
    found: Counter[str] = Counter()
    while flips:
        run = subprocess.run(
            [sys.executable, "-m", "tests.storage.acid.bit_flipper", str(home), *mode],
            input="".join(json.dumps(flip) + "\n" for flip in flips),
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        lines = run.stdout.splitlines()
        for flip, outcome in zip(flips, lines[1::2], strict=False):
            word = outcome.partition(" ")[0]
            assert word in {"right", "error", "wrong"}, f"{flip}: {outcome}"
            found[word if word != "wrong" else f"wrong {flip}"] += 1
        answered = len(lines[1::2])
        if answered < len(flips):
            assert run.returncode in LOUD_DEATHS, f"{flips[answered]}: {run.returncode} {run.stderr}"
            found["death"] += 1
            answered += 1
        flips = flips[answered:]
    return found


def anywhere(home: Path, count: int, seed: int) -> list[tuple[str, int, int]]:
    dice = random.Random(seed)
    files = sizes(home)
    names = dice.choices(list(files), list(files.values()), k=count)
    return [(name, dice.randrange(files[name]), dice.randrange(8)) for name in names]


def in_meta_pages(home: Path, count: int, seed: int) -> list[tuple[str, int, int]]:
    dice = random.Random(seed)
    every = [
        (name, page + offset, bit)
        for name in sizes(home)
        if name.endswith("data.mdb")
        for page in (0, 4096)
        for offset in range(META_BYTES)
        for bit in range(8)
    ]
    return dice.sample(every, min(count, len(every)))


@pytest.mark.timeout(1800)
def test_flipped_bit_is_harmless_or_reported(home: Path, long: bool) -> None:
    flips = anywhere(home, 10_000 if long else 50, 1) + in_meta_pages(home, 10_000 if long else 50, 2)
    found = outcomes(home, flips)
    assert not [word for word in found if word.startswith("wrong")]
    assert found["right"] > 0
    assert found["error"] > 0


def test_flips_are_detected_as_wrong_bytes_without_checksums(tmp_path: Path) -> None:
    make_store(tmp_path, crashed=False)
    found = outcomes(tmp_path, anywhere(tmp_path, 150, 3), "unchecked")
    assert any(word.startswith("wrong") for word in found), found


def test_damage_names_stream_and_position_and_leaves_the_rest_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 600)
    store = open_acid(tmp_path, 1, MAP_BYTES, 1)
    driver = Driver([store])
    driver.recover(store)
    sick = driver.create("sick", [b"a" * 500, b"b" * 500, b"c" * 500])
    sound = driver.create("sound", [b"d" * 500])
    driver.commit()
    store.close()
    path = tmp_path / "acid" / "shard-00" / "data.mdb"
    content = path.read_bytes()
    assert content.count(b"c" * 100 + b"c" * 100) > 0
    at = content.index(b"b" * 300)
    path.write_bytes(content[:at] + b"B" + content[at + 1 :])

    store = open_acid(tmp_path, 1, MAP_BYTES, 1)
    driver = Driver([store])
    driver.recover(store)
    sick, sound = driver.catalog.by_name["sick"], driver.catalog.by_name["sound"]
    with pytest.raises(CorruptError, match=r"'sick', position 600\b.*checksum"):
        store.read(sick.id, 0, 1500)
    with pytest.raises(CorruptError, match=r"'sick', position 600\b.*checksum"):
        store.read(sick.id, 1199, 1200)
    assert b"".join(store.read(sick.id, 0, 600)) == b"a" * 500 + b"b" * 100
    assert b"".join(store.read(sick.id, 1200, 1500)) == b"c" * 300
    assert messages_of(store, sound) == [b"d" * 500]
    store.close()
    problems = list(check(tmp_path))
    assert len(problems) == 1
    assert "'sick', position 600" in problems[0]
