"""The order of the steps at the start of a server."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from headwater.config.layers import load_settings
from headwater.http.server import serving
from tests.ports import free_port


def test_no_client_can_connect_before_the_garbage_collector_is_set(tmp_path: Path) -> None:
    """A full collection after recovery takes long, and a client that connected before it would wait for it."""
    port = free_port()
    refused: list[int] = []

    def probe() -> int:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port))

    async def start() -> None:
        given = {"server.host": "127.0.0.1", "server.port": port, "storage.mode": "memory"}
        settings = load_settings(None, None, {}, tmp_path, given, "settings of a test").settings
        async with serving(settings, 1024, on_recovered=lambda: refused.append(probe())):
            assert probe() == 0

    asyncio.run(start())
    assert len(refused) == 1
    assert refused[0] != 0
