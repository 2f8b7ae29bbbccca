"""A client of the MCP server beside it, with the official SDK: calls the tool until it has succeeded, in one session.

python examples/mcp/client.py http://localhost:8439/mcp/ Ulysses
"""

from __future__ import annotations

import asyncio
import sys
import time

import httpx2
from mcp import ClientSession, MCPError, types
from mcp.client.streamable_http import streamable_http_client

RETRY_S = 1.0
CONNECTION_RETRIES = 6
"""With a delay that doubles from half a second, about 15 seconds."""
ANSWER_TIMEOUT_S = 60.0


async def show_progress(progress: float, total: float | None, message: str | None) -> None:
    print(f"{message} ({progress:g}/{total:g})" if total else message, flush=True)


async def read_book(session: ClientSession, title: str) -> str:
    """Call the tool again until it has succeeded: each call continues where the last one ended."""
    while True:
        try:
            result = await session.call_tool("read_book", {"title": title}, ANSWER_TIMEOUT_S, show_progress)
        except MCPError as error:
            print(f"interrupted: {error}; calling again in the same session", flush=True)
            await asyncio.sleep(RETRY_S)
            continue
        assert isinstance(result.content[0], types.TextContent)
        return result.content[0].text


async def main(url: str, title: str) -> None:
    # The SDK gives up when it cannot connect, as while the server is being restarted; so connections are tried again.
    transport = httpx2.AsyncHTTPTransport(retries=CONNECTION_RETRIES)
    http = httpx2.AsyncClient(transport=transport, timeout=httpx2.Timeout(30.0, read=300.0))
    async with (
        http,
        streamable_http_client(url, http_client=http) as (read, write),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        print(f"session opened; reading {title}. Kill the server meanwhile.", flush=True)
        print(await read_book(session, title), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else f"Book{int(time.time())}"))
