"""A FastAPI application that answers with durable responses, run by uvicorn (`tests/ai/processes.py`).

python -m tests.ai.app STREAM_ROOT      prints its address, and ends when its stdin closes
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response

from headwater.ai import AG_UI, durable_response, reconnect_response, shutdown, stop_generation, stream_at
from tests.ai.processes import WORDS, wait_until_answers
from tests.ports import free_port

HELD_AFTER = "stream"
LEASE_S = float(os.environ.get("AI_TEST_LEASE_S", "30"))


async def held(source: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """The first words of an answer, then silence."""
    async for event in source:
        yield event
        if event.get("delta", "").strip() == HELD_AFTER:
            await asyncio.Event().wait()


async def answer(gate: asyncio.Event | None, fail: bool = False) -> AsyncIterator[dict[str, Any]]:
    """A model of few words, as UI message chunks of the Vercel AI SDK. A gate holds it in the middle of its answer."""
    yield {"type": "start", "messageId": "m1"}
    yield {"type": "text-start", "id": "t1"}
    for word in WORDS:
        yield {"type": "text-delta", "id": "t1", "delta": f"{word} "}
        if gate is not None and word == HELD_AFTER:
            await gate.wait()
        if fail and word == "remembers":
            raise RuntimeError("a secret of the server")
    yield {"type": "text-end", "id": "t1"}
    yield {"type": "finish"}


async def turn(messages: list[Any]) -> AsyncIterator[dict[str, Any]]:
    """The user's last message, then the answer to it."""
    asked, reply = messages[-1], f"answer-{len(messages)}"
    text = "".join(part.get("content", "") for part in asked["parts"])
    for message_id, role, pieces in ((asked["id"], "user", [text]), (reply, "assistant", [f"{w} " for w in WORDS])):
        yield {"type": "TEXT_MESSAGE_START", "messageId": message_id, "role": role}
        for piece in pieces:
            yield {"type": "TEXT_MESSAGE_CONTENT", "messageId": message_id, "delta": piece}
        yield {"type": "TEXT_MESSAGE_END", "messageId": message_id}


def application(root: str, read_root: str | None = None) -> FastAPI:
    """Answers are written below `root`, and clients are sent to `read_root` if it differs."""
    read_root = read_root or root

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await shutdown()

    app = FastAPI(lifespan=lifespan)
    gates: dict[str, asyncio.Event | None] = {}

    @app.post("/api/chat")
    async def chat(request: Request) -> Response:
        asked = await request.json()
        gate = gates[asked["id"]] = asyncio.Event() if asked.get("hold") else None
        source = answer(gate, asked.get("fail", False))
        return await durable_response(
            source,
            stream=f"{root}/answers/{asked['id']}",
            read_url=f"{read_root}/answers/{asked['id']}",
            mode=asked.get("mode", "immediate"),
            lease_s=LEASE_S,
        )

    @app.post("/api/session")
    async def session(request: Request) -> Response:
        """One stream holds the whole conversation, in the events of AG-UI, and stays open."""
        asked = await request.json()
        url = f"{root}/sessions/{request.query_params['id']}"
        source = turn(asked["messages"])
        if "hold" in request.query_params:
            source = held(source)
        return await durable_response(source, stream=url, event_format=AG_UI, close=False, lease_s=LEASE_S)

    @app.get("/api/chat/{chat_id}/stream")
    async def resume(chat_id: str) -> Response:
        return await reconnect_response(f"{root}/answers/{chat_id}", read_url=f"{read_root}/answers/{chat_id}")

    @app.post("/api/chat/{chat_id}/release")
    async def release(chat_id: str) -> None:
        """Let an answer that is held continue."""
        gate = gates[chat_id]
        assert gate is not None
        gate.set()

    @app.post("/api/crash")
    async def crash() -> None:
        """End this process as a crash does. Call it only where the application runs in a separate process."""
        os.kill(os.getpid(), signal.SIGKILL)

    @app.post("/api/chat/{chat_id}/stop")
    async def stop(chat_id: str) -> dict[str, bool]:
        return {"stopped": await stop_generation(stream_at(f"{root}/answers/{chat_id}"), "the user stopped it")}

    return app


def main() -> None:
    port = free_port()
    config = uvicorn.Config(application(sys.argv[1]), host="127.0.0.1", port=port, log_level="error")
    server = uvicorn.Server(config)
    threading.Thread(target=_print_when_ready, args=(port,), daemon=True).start()
    server.run()


def _print_when_ready(port: int) -> None:
    wait_until_answers(port)
    sys.stdout.write(f"listening on http://127.0.0.1:{port}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
