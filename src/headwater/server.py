"""Embed a server in an asyncio program.

    async with Server("./data") as server:
        print(server.url)

Invariant: the server runs in the caller's event loop and does not change the process: no signal handlers, no limits.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from headwater.config.layers import load_settings
from headwater.config.sections import Settings
from headwater.http.server import serving

_NO_DIRECTORY: Final = Path("/nonexistent")
"""`headwater serve` reads settings files in its working directory; an embedded server reads none."""
_OPEN_FILES_MAX: Final = 65_536


class Server:
    """One server on one address. `url` is its address once it is started.

    Without a `data_dir` everything is in memory; with one, the storage mode is `file-durable`. `settings` are those of
    `headwater config show`, by their dotted names: `{"server.long_poll_timeout_secs": 5}`.
    """

    def __init__(
        self,
        data_dir: str | Path | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        flags: dict[str, Any] = {"server.host": host, "server.port": port}
        if data_dir is None:
            flags["storage.mode"] = "memory"
        else:
            flags |= {"storage.mode": "file-durable", "storage.data_dir": str(data_dir)}
        given = {**flags, **(settings or {})}
        self._settings: Settings = load_settings(None, None, {}, _NO_DIRECTORY, given, "settings of Server").settings
        self._running = AsyncExitStack()
        self.url = ""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Recover the data and listen. Raises `OSError` if the address cannot be bound."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = _OPEN_FILES_MAX if soft == resource.RLIM_INFINITY else min(soft, _OPEN_FILES_MAX)
        self.url = await self._running.enter_async_context(serving(self._settings, limit))

    async def stop(self) -> None:
        """Complete requests in progress, end live readers, and close the storage."""
        await self._running.aclose()

    def stream_url(self, name: str) -> str:
        return f"{self.url}/v1/stream/{name}"
