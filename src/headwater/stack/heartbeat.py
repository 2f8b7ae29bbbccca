"""The heartbeat producer of the dev profile: odd ticks insert into `items`, even ticks post a session event.

Run as `python -m headwater.stack.heartbeat [INTERVAL_SECONDS]`, with DS_SERVER_URL, POSTGRES_URL and, for a server
with TLS, DS_CA_FILE. Invariant: a failed tick is logged and the next tick follows; only a signal ends the heartbeat.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Final

import psycopg

from headwater.client import NO_RETRY, ClientError, Stream

STREAM: Final = "session-events"
DEFAULT_INTERVAL_S: Final = 5.0
TIMEOUT_S: Final = 10.0

_ITEMS: Final = """CREATE TABLE IF NOT EXISTS public.items (
    id SERIAL PRIMARY KEY,
    title TEXT NOT NULL,
    body TEXT,
    created_at TIMESTAMPTZ DEFAULT NOW()
)"""

log = logging.getLogger("headwater.heartbeat")


class Heartbeat:
    def __init__(self, server_url: str, postgres_url: str, ca_file: str = "") -> None:
        url = f"{server_url.rstrip('/')}/v1/stream/{STREAM}"
        # The next tick is the retry.
        self._stream = Stream(
            url, timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S, ca_file=ca_file or None, retry=NO_RETRY
        )
        self._postgres_url = postgres_url

    def beat(self, tick: int) -> None:
        """Run one tick. A failure is logged, not raised."""
        try:
            if tick % 2:
                self._insert(tick)
            else:
                self._post(tick)
        except (psycopg.Error, ClientError) as error:
            log.warning("tick %d failed: %s", tick, error)

    def close(self) -> None:
        self._stream.disconnect()

    def _insert(self, tick: int) -> None:
        with psycopg.connect(self._postgres_url, connect_timeout=5) as connection:
            connection.execute(_ITEMS)
            row = [f"heartbeat {tick}", _moment()]
            connection.execute("INSERT INTO public.items (title, body) VALUES (%s, %s)", row)
        log.info("tick %d: inserted into items", tick)

    def _post(self, tick: int) -> None:
        self._stream.create()
        event = {"key": "heartbeat", "type": "heartbeat", "operation": "set", "value": {"tick": tick, "at": _moment()}}
        self._stream.append(event)
        log.info("tick %d: posted to %s", tick, STREAM)


def _moment() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    interval_s = float(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_INTERVAL_S
    heartbeat = Heartbeat(os.environ["DS_SERVER_URL"], os.environ["POSTGRES_URL"], os.environ.get("DS_CA_FILE", ""))
    tick = 0
    while True:
        tick += 1
        heartbeat.beat(tick)
        time.sleep(interval_s)


if __name__ == "__main__":
    main()
