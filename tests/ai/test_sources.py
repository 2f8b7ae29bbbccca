"""Streams of real libraries as durable events: openai, pydantic-ai, LangGraph, and sessions of the Agents SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypedDict

import pytest

from headwater import AsyncStream
from headwater.ai import Generation
from headwater.ai.agents import DurableSession
from headwater.ai.sources import from_langgraph, from_openai, from_sse
from tests.http_handlers import HandlerServer, QuietHandler
from tests.serving import Server

CHUNKS: list[dict[str, Any]] = [
    {"delta": {"role": "assistant", "content": ""}},
    {"delta": {"reasoning_content": "hm"}},
    {"delta": {"content": "It is "}},
    {"delta": {"content": "sunny."}},
    {"delta": {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "look"}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"at":'}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '"sea"}'}}]}},
    {"delta": {}, "finish_reason": "tool_calls"},
]
UI_CHUNKS = [
    {"type": "start", "messageId": "m"},
    {"type": "start-step"},
    {"type": "reasoning-start", "id": "reasoning-1"},
    {"type": "reasoning-delta", "id": "reasoning-1", "delta": "hm"},
    {"type": "reasoning-end", "id": "reasoning-1"},
    {"type": "text-start", "id": "text-2"},
    {"type": "text-delta", "id": "text-2", "delta": "It is "},
    {"type": "text-delta", "id": "text-2", "delta": "sunny."},
    {"type": "text-end", "id": "text-2"},
    {"type": "tool-input-start", "toolCallId": "c1", "toolName": "look"},
    {"type": "tool-input-delta", "toolCallId": "c1", "inputTextDelta": '{"at":'},
    {"type": "tool-input-delta", "toolCallId": "c1", "inputTextDelta": '"sea"}'},
    {"type": "tool-input-available", "toolCallId": "c1", "toolName": "look", "input": {"at": "sea"}},
    {"type": "finish-step"},
    {"type": "finish", "finishReason": "tool-calls"},
]


class Model(QuietHandler):
    """An OpenAI-compatible endpoint that always streams the same answer."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for choice in CHUNKS:
            body = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            body["choices"] = [{"index": 0, "finish_reason": None, **choice}]
            self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture(scope="module")
def model_url() -> Iterator[str]:
    with HandlerServer(Model).running() as server:
        yield f"{server.url}/v1"


@pytest.fixture
def url(server: Server, stream_name: Callable[[], str]) -> str:
    return server.stream_url(stream_name())


async def written(url: str, source: AsyncIterator[Any]) -> list[Any]:
    """What a reader finds in the stream after a generation."""
    async with AsyncStream(url) as stream:
        generation = Generation(source, stream)
        await generation.start()
        await generation.wait()
        assert generation.outcome == "finished"
        return [event async for event in stream.follow()]


def test_openai_chunks_become_ui_message_chunks(url: str, model_url: str) -> None:
    from openai import AsyncOpenAI

    async def run() -> list[Any]:
        async with AsyncOpenAI(base_url=model_url, api_key="none") as client:
            chunks = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "How is it?"}], stream=True
            )
            return await written(url, from_openai(chunks, message_id="m"))

    assert asyncio.run(run()) == UI_CHUNKS


def test_openai_chunks_as_json_are_the_same(url: str) -> None:
    async def chunks() -> AsyncIterator[Any]:
        for choice in CHUNKS:
            yield {"choices": [{"index": 0, "finish_reason": None, **choice}]}
        yield {"choices": [], "usage": {"total_tokens": 3}}

    assert asyncio.run(written(url, from_openai(chunks(), message_id="m"))) == UI_CHUNKS


def test_pydantic_ai_as_vercel_ai_events(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.test import TestModel
    from pydantic_ai.ui.vercel_ai import VercelAIAdapter

    asked = {
        "trigger": "submit-message",
        "id": "chat",
        "messages": [{"id": "u", "role": "user", "parts": [{"type": "text", "text": "Hello"}]}],
    }

    async def run() -> list[Any]:
        agent = Agent(TestModel(custom_output_text="hello there"))
        adapter = VercelAIAdapter(agent, VercelAIAdapter.build_run_input(json.dumps(asked).encode()))
        return await written(url, from_sse(adapter.encode_stream(adapter.run_stream())))

    events = asyncio.run(run())
    assert "".join(event["delta"] for event in events if event["type"] == "text-delta") == "hello there"
    assert [events[0]["type"], events[-1]["type"]] == ["start", "finish"]


def test_pydantic_ai_as_ag_ui_events(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.test import TestModel
    from pydantic_ai.ui.ag_ui import AGUIAdapter

    asked = {
        "threadId": "t",
        "runId": "r",
        "state": {},
        "tools": [],
        "context": [],
        "forwardedProps": {},
        "messages": [{"id": "u", "role": "user", "content": "Hello"}],
    }

    async def run() -> list[Any]:
        agent = Agent(TestModel(custom_output_text="hello there"))
        adapter = AGUIAdapter(agent, AGUIAdapter.build_run_input(json.dumps(asked).encode()))
        return await written(url, from_sse(adapter.encode_stream(adapter.run_stream())))

    events = asyncio.run(run())
    assert "".join(event["delta"] for event in events if event["type"] == "TEXT_MESSAGE_CONTENT") == "hello there"
    assert [events[0]["type"], events[-1]["type"]] == ["RUN_STARTED", "RUN_FINISHED"]


def test_langgraph_streams_modes_and_messages(url: str) -> None:
    from langchain_core.messages import AIMessage
    from langgraph.graph import END, START, StateGraph

    class State(TypedDict):
        messages: list[Any]

    def reply(state: State) -> State:
        return {"messages": [AIMessage(content="hello")]}

    graph: Any = StateGraph(State)
    graph.add_node("reply", reply)
    graph.add_edge(START, "reply")
    graph.add_edge("reply", END)
    compiled = graph.compile()

    async def several() -> list[Any]:
        source = compiled.astream({"messages": []}, stream_mode=["updates", "values"])
        return await written(url, from_langgraph(source))

    events = asyncio.run(several())
    assert [event["event"] for event in events] == ["values", "updates", "values"]
    assert events[1]["data"]["reply"]["messages"][0]["content"] == "hello"

    async def one() -> list[Any]:
        source = compiled.astream({"messages": []}, stream_mode="updates")
        return await written(f"{url}-one", from_langgraph(source))

    assert [event["event"] for event in asyncio.run(one())] == ["updates"]


def test_sessions_of_the_agents_sdk_are_shared_and_survive(url: str) -> None:
    from agents import Agent, ModelResponse, RunConfig, Runner, Usage
    from agents.memory import Session
    from agents.models.interface import Model as AgentModel
    from openai.types.responses import ResponseOutputMessage, ResponseOutputText

    class Echo(AgentModel):  # type: ignore[misc]
        """Says how many items of the conversation it was given."""

        async def get_response(self, system_instructions: Any, input: Any, *args: Any, **options: Any) -> ModelResponse:  # noqa: A002
            text = ResponseOutputText(text=f"{len(input)} items", type="output_text", annotations=[])
            message = ResponseOutputMessage(
                id="m", role="assistant", type="message", status="completed", content=[text]
            )
            return ModelResponse(output=[message], usage=Usage(), response_id=None)

        def stream_response(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

    async def run() -> None:
        agent = Agent(name="echo", model=Echo())
        config = RunConfig(tracing_disabled=True)
        async with AsyncStream(url) as stream, AsyncStream(url) as elsewhere:
            session = DurableSession("s", stream)
            assert isinstance(session, Session)
            first = await Runner.run(agent, "one", session=session, run_config=config)
            assert first.final_output == "1 items"
            # Another process has the same session.
            other = DurableSession("s", elsewhere)
            second = await Runner.run(agent, "two", session=other, run_config=config)
            assert second.final_output == "3 items"
            items = await session.get_items()
            assert [item.get("content") for item in items if item.get("role") == "user"] == ["one", "two"]
            assert await session.get_items(1) == items[-1:]
            assert await other.pop_item() == items[-1]
            assert await session.get_items() == items[:-1]
            await session.clear_session()
            assert await other.get_items() == []
            assert await other.pop_item() is None

    asyncio.run(run())
