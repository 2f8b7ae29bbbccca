"""An MCP server that survives its restart: sessions, responses and the work of its tool are in streams.

    make example-mcp

The tool `read_book` reads a book chapter by chapter and reports its progress. Kill this process during a call: the
client keeps its session, learns that the call was interrupted, and calls again; the tool continues with the next
chapter, because what it has read is in the stream `books/{title}`.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import uvicorn
from mcp import types
from mcp.server.lowlevel import Server
from starlette.applications import Starlette
from starlette.routing import Mount

from headwater.ai.mcp import DurableSessionManager
from headwater.client.asynchronous import AsyncClient

CHAPTERS = 20
PAUSE_S = 0.3
READ_BOOK = types.Tool(
    name="read_book",
    description="Reads a book, chapter by chapter.",
    input_schema={"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]},
)


def application(streams: str) -> Starlette:
    client = AsyncClient(streams)

    async def list_tools(_context: Any, _params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[READ_BOOK])

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        title = str((params.arguments or {}).get("title", ""))
        if not title.isalnum() or len(title) > 64:
            text = "The title has up to 64 letters and digits."
            return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=True)
        book = client.stream(f"books/{title}")
        await book.create()
        read = [chapter async for chapter in book.read()]
        for chapter in range(len(read) + 1, CHAPTERS + 1):
            await anyio.sleep(PAUSE_S)
            # The number is also the sequence: of two calls that read the same book, one is refused.
            await book.append(chapter, seq=f"{chapter:04}")
            read.append(chapter)
            await context.session.report_progress(chapter, CHAPTERS, f"chapter {chapter} of {title}")
        text = f"read chapters {read}"
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)])

    server = Server("books", on_list_tools=list_tools, on_call_tool=call_tool)
    sessions = DurableSessionManager(server, client, retry_interval=1000)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client, sessions.run():
            yield

    return Starlette(routes=[Mount("/mcp", app=sessions.handle_request)], lifespan=lifespan)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", default="http://localhost:4437", help="the Headwater server")
    parser.add_argument("--port", type=int, default=8439)
    arguments = parser.parse_args()
    app = application(arguments.streams)
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning", timeout_graceful_shutdown=2)


if __name__ == "__main__":
    main()
