"""A change feed: every change of a database table becomes an event in a stream, and a replica follows it.

    python examples/change_feed.py --database shop.db --changes 50

makes a table in SQLite, changes it at random, publishes the changes, and shows that a replica built from the stream
alone holds the same rows. Run it again, and it continues where it stopped.

Invariant: each change is in the stream once, in order, whatever dies when. Triggers write changes into an outbox in the
same transaction as the change. The publisher first gives a batch its number, durably, then appends it under that
number, then forgets it; a batch that is sent twice carries the same number and the same rows, so the server keeps one.
"""

from __future__ import annotations

import argparse
import os
import random
import sqlite3
from contextlib import closing
from typing import Any

from headwater.client import ProducerStamp, Stream

BATCH_ROWS = 100
PRODUCER = "change-feed"
Rows = dict[int, dict[str, Any]]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS items (id INTEGER PRIMARY KEY, title TEXT NOT NULL, price REAL NOT NULL);
CREATE TABLE IF NOT EXISTS outbox (id INTEGER PRIMARY KEY AUTOINCREMENT, event TEXT NOT NULL, batch INTEGER);
CREATE TABLE IF NOT EXISTS published (batches INTEGER NOT NULL);
INSERT INTO published SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM published);
"""
_TRIGGER = """
CREATE TRIGGER IF NOT EXISTS items_{operation} AFTER {operation} ON items BEGIN
  INSERT INTO outbox (event) VALUES (json_object('type', 'item', 'key', CAST({row}.id AS TEXT),
    {value} 'headers', json_object('operation', lower('{operation}'))));
END;
"""
_VALUE = "'value', json_object('title', new.title, 'price', new.price),"


def open_database(path: str) -> sqlite3.Connection:
    """The table, and triggers that note every change of it in the outbox."""
    database = sqlite3.connect(path)
    triggers = (("INSERT", "new", _VALUE), ("UPDATE", "new", _VALUE), ("DELETE", "old", ""))
    made = [_TRIGGER.format(operation=operation, row=row, value=value) for operation, row, value in triggers]
    database.executescript(_SCHEMA + "".join(made))
    return database


def change_at_random(database: sqlite3.Connection, chance: random.Random, count: int) -> None:
    for _ in range(count):
        known = [row[0] for row in database.execute("SELECT id FROM items")]
        kind = chance.choice(["insert", "insert", "update", "delete"]) if known else "insert"
        price = round(chance.random() * 100, 2)
        with database:
            if kind == "insert":
                title = f"thing {chance.randint(1, 999)}"
                database.execute("INSERT INTO items (title, price) VALUES (?, ?)", (title, price))
            elif kind == "update":
                database.execute("UPDATE items SET price = ? WHERE id = ?", (price, chance.choice(known)))
            else:
                database.execute("DELETE FROM items WHERE id = ?", (chance.choice(known),))


def publish(database: sqlite3.Connection, stream: Stream) -> int:
    """Send everything in the outbox; returns the number of changes."""
    sent = 0
    while (batch := _next_batch(database)) is not None:
        number, events = batch
        body = f"[{','.join(events)}]".encode()
        stream.append_body(body, producer=ProducerStamp(PRODUCER, epoch=0, seq=number))
        with database:
            database.execute("DELETE FROM outbox WHERE batch = ?", (number,))
            database.execute("UPDATE published SET batches = ?", (number + 1,))
        sent += len(events)
    return sent


def _next_batch(database: sqlite3.Connection) -> tuple[int, list[str]] | None:
    """The batch that was begun, or a new one; its rows are fixed before it is sent."""
    (number,) = database.execute("SELECT batches FROM published").fetchone()
    with database:
        begun = database.execute("SELECT 1 FROM outbox WHERE batch = ?", (number,)).fetchone()
        if begun is None:
            waiting = "SELECT id FROM outbox WHERE batch IS NULL ORDER BY id LIMIT ?"
            database.execute(f"UPDATE outbox SET batch = ? WHERE id IN ({waiting})", (number, BATCH_ROWS))
    rows = database.execute("SELECT event FROM outbox WHERE batch = ? ORDER BY id", (number,))
    events = [event for (event,) in rows]
    return (number, events) if events else None


def replicate(stream: Stream) -> Rows:
    """The table, from the stream alone."""
    rows: Rows = {}
    for event in stream.read():
        key = int(event["key"])
        if event["headers"]["operation"] == "delete":
            del rows[key]
        else:
            rows[key] = event["value"]
    return rows


def table(database: sqlite3.Connection) -> Rows:
    found = database.execute("SELECT id, title, price FROM items")
    return {key: {"title": title, "price": price} for key, title, price in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default=os.environ.get("DS_URL", "http://localhost:4437"), help="the server")
    parser.add_argument("--stream", default="feeds/items", help="the stream of changes")
    parser.add_argument("--database", default="items.db", metavar="FILE", help="the SQLite database")
    parser.add_argument("--changes", type=int, default=50, help="how many changes to make")
    arguments = parser.parse_args()
    url = f"{arguments.url.rstrip('/')}/v1/stream/{arguments.stream}"
    with closing(open_database(arguments.database)) as database, Stream(url) as stream:
        stream.create()
        change_at_random(database, random.Random(), arguments.changes)
        print(f"published {publish(database, stream)} changes")
        ours, theirs = table(database), replicate(stream)
        print(f"{len(ours)} rows here, {len(theirs)} in the replica, {'the same' if ours == theirs else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
