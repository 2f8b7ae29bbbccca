"""Flip bits in the files of a closed store and report the effect; a separate process, because LMDB may crash.

    python -m tests.storage.acid.bit_flipper HOME [unchecked] < FLIPS

HOME contains `store` (never changed) and `expected` (its digest, see `digest`). FLIPS are JSON lines [file, offset,
bit]. For each one, the process prints `flip N` before it, and `right`, `wrong` or `error WHAT` after it. With
`unchecked` the store does not verify checksums of bodies, which shows that the test would detect wrong data.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

from headwater.core.catalog import Catalog, StreamState
from headwater.storage.acid import pieces
from headwater.storage.acid.layout import read_manifest
from headwater.storage.interface import StorageError
from tests.storage.acid.driver import messages_of, open_lazy, state_of

MAP_BYTES = 2**26


def digest(directory: Path) -> str:
    """Compute a digest of every state, document and message in a store."""
    shards = read_manifest(directory / "acid").shard_count
    store = open_lazy(directory, shards, MAP_BYTES)
    try:
        catalog: Catalog[StreamState] = Catalog(StreamState)
        for record in store.recover():
            catalog.apply(record)
        found = hashlib.sha256(repr(state_of(catalog)).encode())
        for stream_id in sorted(catalog.by_id):
            stream = catalog.by_id[stream_id]
            for text in messages_of(store, stream):
                found.update(b"%d:" % len(text) + text)
            middle = (stream.base.message_index + stream.message_index) // 2
            found.update(repr(store.boundary(stream_id, middle)).encode())
        return found.hexdigest()
    finally:
        store.close()


def flip(home: Path, name: str, offset: int, bit: int) -> str:
    copy = home / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(home / "store", copy, ignore=shutil.ignore_patterns("LOCK", "lock.mdb"))
    path = copy / name
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)
    try:
        found = digest(copy)
    except StorageError as error:
        return f"error {error}"
    return "right" if found == (home / "expected").read_text() else "wrong"


def main() -> None:
    pieces.PIECE_BYTES = 600  # type: ignore[misc]
    home = Path(sys.argv[1])
    if sys.argv[2:] == ["unchecked"]:
        pieces.StoredPiece.verified_body = lambda self: self.body  # type: ignore[method-assign]
    for number, line in enumerate(sys.stdin):
        sys.stdout.write(f"flip {number}\n")
        sys.stdout.flush()
        try:
            outcome = flip(home, *json.loads(line))
        except Exception as error:
            outcome = f"crash {error!r}"
        sys.stdout.write(" ".join(outcome.split()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
