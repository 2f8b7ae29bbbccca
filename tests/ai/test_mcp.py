"""MCP's resumable HTTP transport with durable events and the real SDK: lost responses are replayed, once, in order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

from headwater import AsyncClient
from tests.serving import Server
from tests.waiting import async_wait_until

# The SDK is imported in the tests: it takes a second, and every process of the tests imports this module.
if TYPE_CHECKING:
    from mcp import types
    from mcp.server.streamable_http import EventMessage

    from headwater.ai.mcp import DurableEventStore, DurableSessionManager

STEPS = 6


def notification(number: int) -> types.JSONRPCNotification:
    from mcp import types

    return types.JSONRPCNotification(jsonrpc="2.0", method="notifications/message", params={"n": number})


async def replayed(store: DurableEventStore, last_event_id: str) -> tuple[str | None, list[EventMessage]]:
    sent: list[EventMessage] = []

    async def send(event: EventMessage) -> None:
        sent.append(event)

    return await store.replay_events_after(last_event_id, send), sent


def test_events_after_an_id_are_replayed_also_after_a_restart(server: Server, stream_name: Callable[[], str]) -> None:
    from mcp import types

    from headwater.ai.mcp import DurableEventStore

    async def run() -> None:
        async with AsyncClient(server.url) as client:
            store = DurableEventStore(client, stream_name(), session="../s 1")
            prefix = store._root.split("/")[0]
            primed = await store.store_event("7", None)
            ids = [await store.store_event("7", notification(n)) for n in range(4)]
            answer = types.JSONRPCResponse(jsonrpc="2.0", id=7, result={})
            ids.append(await store.store_event("7", answer))
            await store.store_event("8", notification(99))
            restarted = DurableEventStore(client, prefix, session="../s 1")
            stream_id, events = await replayed(restarted, ids[1])
            assert stream_id == "7"
            assert [event.event_id for event in events] == ids[2:]
            assert [event.message for event in events] == [notification(2), notification(3), answer]
            assert [event.event_id for event in (await replayed(restarted, primed))[1]] == ids
            later = await restarted.store_event("7", notification(5))
            assert later not in ids
            assert [event.event_id for event in (await replayed(store, ids[4]))[1]] == [later]
            # Another session sees nothing of it, and no spelling of an id leads elsewhere.
            other = DurableEventStore(client, prefix, session="s 2")
            for wrong in (ids[1], "x", "", "../7.1", f"{ids[0]}0", "zz.1"):
                assert await replayed(other, wrong) == (None, [])

    asyncio.run(run())


async def call_tool(context: Any, params: Any) -> types.CallToolResult:
    """Reports its progress in steps, so that there is something to lose in the middle."""
    from mcp import types

    for step in range(STEPS):
        await context.session.send_progress_notification(
            "p", step, message=f"{params.arguments['who']} {step}", related_request_id=context.request_id
        )
        await anyio.sleep(0.05)
    return types.CallToolResult(content=[types.TextContent(type="text", text="done")])


@asynccontextmanager
async def mcp_client(url: str, prefix: str) -> AsyncIterator[httpx.AsyncClient]:
    """The MCP server as an ASGI application within this process, over a real socket."""
    import uvicorn
    from mcp.server.lowlevel import Server as McpServer
    from starlette.applications import Starlette
    from starlette.routing import Mount

    from headwater.ai.mcp import DurableSessionManager
    from tests.ports import free_port

    async with AsyncClient(url) as client:
        manager = DurableSessionManager(McpServer("test", on_call_tool=call_tool), client, prefix, retry_interval=10)
        app = Starlette(routes=[Mount("/mcp", app=manager.handle_request)])
        port = free_port()
        serving = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
        async with manager.run():
            task = asyncio.create_task(serving.serve())
            await async_wait_until(lambda: serving.started, what="the start of uvicorn")
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                yield http
            serving.should_exit = True
            await task


HEADERS = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


async def initialized(http: httpx.AsyncClient) -> dict[str, str]:
    body = {
        "jsonrpc": "2.0",
        "id": 0,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        },
    }
    async with http.stream("POST", "/mcp/", json=body, headers=HEADERS) as response:
        assert response.status_code == 200, await response.aread()
        session = {**HEADERS, "Mcp-Session-Id": response.headers["mcp-session-id"]}
        await response.aread()
    done = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    assert (await http.post("/mcp/", json=done, headers=session)).status_code == 202
    return session


async def events_of(response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    event_id = ""
    async for line in response.aiter_lines():
        if line.startswith("id:"):
            event_id = line[3:].strip()
        elif line.startswith("data:") and line[5:].strip():
            yield event_id, json.loads(line[5:])


def test_a_lost_response_is_resumed_where_it_broke_off(server: Server, stream_name: Callable[[], str]) -> None:
    async def one(http: httpx.AsyncClient, who: str) -> list[Any]:
        session = await initialized(http)
        call = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {"name": "t", "arguments": {"who": who}, "_meta": {"progressToken": "p"}},
        }
        seen: list[Any] = []
        last_id = ""
        async with http.stream("POST", "/mcp/", json=call, headers=session) as response:
            async for event_id, message in events_of(response):
                last_id = event_id
                seen.append(message)
                if len(seen) == 2:
                    break
        resumed = {**session, "Last-Event-ID": last_id}
        async with http.stream("GET", "/mcp/", headers=resumed) as response:
            assert response.status_code == 200, await response.aread()
            async for _, message in events_of(response):
                seen.append(message)
                if "result" in message:
                    return seen
        raise AssertionError(f"the response ended without a result: {seen}")

    async def run() -> None:
        async with mcp_client(server.url, stream_name()) as http:
            # Both sessions use the request id 1: neither sees events of the other.
            answers = await asyncio.gather(one(http, "anna"), one(http, "bert"))
            for who, seen in zip(("anna", "bert"), answers, strict=True):
                said = [message["params"]["message"] for message in seen if "params" in message]
                assert said == [f"{who} {step}" for step in range(STEPS)]
                assert seen[-1]["result"]["content"][0]["text"] == "done"

    asyncio.run(run())


TOOL_CALL = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": "t", "arguments": {"who": "anna"}, "_meta": {"progressToken": "p"}},
}


async def called(http: httpx.AsyncClient, session: dict[str, str], request_id: int = 2) -> list[Any]:
    call = {**TOOL_CALL, "id": request_id}
    async with http.stream("POST", "/mcp/", json=call, headers=session) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["mcp-session-id"] == session["Mcp-Session-Id"]
        return [message async for _, message in events_of(response)]


def test_a_session_survives_a_restart_and_an_interrupted_call_ends_with_an_error(
    server: Server, stream_name: Callable[[], str]
) -> None:
    async def run() -> None:
        prefix, last_id = stream_name(), ""
        async with mcp_client(server.url, prefix) as http:
            session = await initialized(http)
            async with http.stream("POST", "/mcp/", json=TOOL_CALL, headers=session) as response:
                async for event_id, _ in events_of(response):
                    last_id = event_id
                    break
        async with mcp_client(server.url, prefix) as http:
            async with http.stream("GET", "/mcp/", headers={**session, "Last-Event-ID": last_id}) as response:
                assert response.status_code == 200, await response.aread()
                async for _, message in events_of(response):
                    if "error" in message:
                        break
            assert message["id"] == 1
            assert "Call again" in message["error"]["message"]
            # The same session, without a new handshake; and once more after a second restart.
            assert (await called(http, session))[-1]["result"]["content"][0]["text"] == "done"
        async with mcp_client(server.url, prefix) as http:
            calls = await asyncio.gather(called(http, session, 3), called(http, session, 4))
            assert ["result" in seen[-1] for seen in calls] == [True, True]
            assert (await http.delete("/mcp/", headers=session)).status_code == 200
            assert (await http.post("/mcp/", json=TOOL_CALL, headers=session)).status_code == 404
        async with mcp_client(server.url, prefix) as http:
            for unknown in (session["Mcp-Session-Id"], "../x", "unknown"):
                headers = {**session, "Mcp-Session-Id": unknown}
                assert (await http.post("/mcp/", json=TOOL_CALL, headers=headers)).status_code == 404

    asyncio.run(run())


def test_a_session_is_opened_again_only_for_the_credential_that_opened_it(
    server: Server, stream_name: Callable[[], str]
) -> None:
    from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
    from mcp.server.auth.provider import AccessToken
    from mcp.server.lowlevel import Server as McpServer

    from headwater.ai.mcp import DurableSessionManager

    async def status(manager: DurableSessionManager, body: Any, who: str, session: str | None) -> tuple[int, str]:
        headers = [(b"content-type", b"application/json"), (b"accept", b"application/json, text/event-stream")]
        if session is not None:
            headers.append((b"mcp-session-id", session.encode()))
        user = AuthenticatedUser(AccessToken(token="t", client_id=who, scopes=[]))
        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers, "user": user}
        started: list[Any] = []
        given = False

        async def receive() -> Any:
            nonlocal given
            if given:
                await asyncio.Event().wait()
            given = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                started.append(message)

        await manager.handle_request(scope, receive, send)
        named = dict(started[0]["headers"]).get(b"mcp-session-id", b"").decode()
        return started[0]["status"], named

    async def run() -> None:
        prefix = stream_name()
        listing = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        async with AsyncClient(server.url) as client:
            first = DurableSessionManager(McpServer("test"), client, prefix)
            async with first.run():
                opening = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
                code, session = await status(first, opening, "anna", None)
                assert code == 200
            second = DurableSessionManager(McpServer("test"), client, prefix)
            async with second.run():
                assert (await status(second, listing, "bert", session))[0] == 404
                assert (await status(second, listing, "anna", session)) == (200, session)
                assert (await status(second, listing, "bert", session))[0] == 404

    asyncio.run(run())


def test_a_shared_store_is_refused() -> None:
    from mcp.server.lowlevel import Server as McpServer

    from headwater.ai.mcp import DurableSessionManager

    with pytest.raises(TypeError, match="their own"):
        DurableSessionManager(McpServer("test"), AsyncClient("http://localhost:1"), event_store=object())
