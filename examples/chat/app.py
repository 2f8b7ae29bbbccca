"""An AI chat whose answers survive a reload, a second tab, a lost network and a killed process.

    make example-chat                                        with a built-in fake model
    OPENAI_BASE_URL=http://localhost:11434/v1 OPENAI_MODEL=llama3 make example-chat        with a real one

`chats/{id}` is a stream with the questions of a chat. The answer to question n is the stream `chats/{id}/answers/{n}`,
written by a task that does not depend on any request. Both are all the state there is: every process and every tab
reads the chat from there. Invariant: a chat has one answer at a time, and its questions are in the order of their
answers, because a question is appended with its number as `Stream-Seq`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from headwater.ai import durable_response, reconnect_response, shutdown, stop_generation, stream_at
from headwater.ai.sources import from_openai, from_sse
from headwater.client import ConflictError, StreamNotFoundError
from headwater.client.asynchronous import AsyncStream

HERE = Path(__file__).resolve().parent
MODEL_TIMEOUT = httpx.Timeout(120.0, connect=10.0)
LEASE_S = 5.0
"""If this process ends, the server ends its answers after so long, and the pages show an error."""
ChatId = Annotated[str, PathParameter(pattern=r"^[A-Za-z0-9-]{1,64}$")]
Message = dict[str, Any]

_ANSWER = (
    "A durable stream is an append-only log behind a URL. This answer is written to one, token by token, by a task that"
    " no browser holds up. Reload the page, open it in a second tab, or pull the plug of your network: each reader"
    " continues where it was, and nothing is lost or said twice. Only the stop button ends an answer early."
)


async def fake_model(messages: list[Message]) -> AsyncIterator[Message]:
    """Chunks of a chat completion, as an OpenAI-compatible endpoint sends them."""
    for word in f"You asked: “{text_of(messages[-1])}” {_ANSWER}".split(" "):
        yield {"choices": [{"delta": {"content": f"{word} "}}]}
        await asyncio.sleep(0.08)
    yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}


async def openai_model(base_url: str, messages: list[Message]) -> AsyncIterator[Any]:
    body = {
        "model": os.environ.get("OPENAI_MODEL", "gpt-4o-mini"),
        "messages": [{"role": message["role"], "content": text_of(message)} for message in messages],
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}
    async with (
        httpx.AsyncClient(timeout=MODEL_TIMEOUT) as http,
        http.stream("POST", f"{base_url.rstrip('/')}/chat/completions", json=body, headers=headers) as response,
    ):
        response.raise_for_status()
        async for chunk in from_sse(response.aiter_text()):
            yield chunk


def model(messages: list[Message]) -> AsyncIterator[Any]:
    base_url = os.environ.get("OPENAI_BASE_URL")
    return openai_model(base_url, messages) if base_url else fake_model(messages)


def text_of(message: Message) -> str:
    return "".join(part["text"] for part in message["parts"] if part["type"] == "text")


def message_of(message_id: str, events: list[Any]) -> Message:
    """The assistant's message that the events of a finished answer add up to."""
    said: dict[str, str] = {}
    metadata: dict[str, str] = {}
    for event in events:
        match event:
            case {"type": "text-delta", "id": part, "delta": delta}:
                said[part] = said.get(part, "") + delta
            case {"type": "abort"}:
                metadata["end"] = "Stopped."
            case {"type": "error", "errorText": text}:
                metadata["end"] = text
    parts = [{"type": "text", "text": text} for text in said.values()]
    return {"id": message_id, "role": "assistant", "parts": parts, "metadata": metadata}


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat in streams. A question that has no complete answer is the last one."""

    url: str

    @property
    def questions(self) -> AsyncStream:
        return stream_at(self.url)

    def answer(self, number: int) -> AsyncStream:
        return stream_at(f"{self.url}/answers/{number}")

    async def load(self) -> tuple[list[Message], int, str]:
        """The messages, the number of questions, and the offset after the last question."""
        await self.questions.create()
        reader = self.questions.read()
        questions = [question async for question in reader]
        messages: list[Message] = []
        for number, question in enumerate(questions):
            messages.append(question)
            try:
                answer = self.answer(number).read()
                events = [event async for event in answer]
            except StreamNotFoundError:
                continue
            if answer.closed:
                messages.append(message_of(f"{question['id']}-answer", events))
        return messages, len(questions), reader.offset


def application(streams: str, assets: Path) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await shutdown()

    app = FastAPI(lifespan=lifespan)
    app.mount("/assets", StaticFiles(directory=assets))

    @app.get("/")
    async def page() -> Response:
        return FileResponse(HERE / "index.html", headers={"Cache-Control": "no-cache"})

    @app.get("/api/chat/{chat_id}")
    async def load(chat_id: ChatId) -> dict[str, Any]:
        chat = Chat(f"{streams}/chats/{chat_id}")
        messages, _, offset = await chat.load()
        return {"messages": messages, "questions": chat.url, "offset": offset}

    @app.post("/api/chat")
    async def ask(request: Request) -> Response:
        asked = await request.json()
        chat = Chat(f"{streams}/chats/{valid_id(asked.get('id'))}")
        messages, number, _ = await chat.load()
        question = asked["messages"][-1]
        if await is_being_written(chat, number - 1):
            raise HTTPException(409, "An answer is being written; stop it or wait for its end.")
        try:
            await chat.questions.append(question, seq=f"{number:06}")
        except ConflictError:
            raise HTTPException(409, "Another question was asked at the same time.") from None
        source = from_openai(model([*messages, question]), message_id=f"{question['id']}-answer")
        return await durable_response(source, stream=chat.answer(number), lease_s=LEASE_S)

    @app.get("/api/chat/{chat_id}/stream")
    async def resume(chat_id: ChatId) -> Response:
        """The answer to the last question: a page that does not have it yet reads it, complete or not."""
        chat = Chat(f"{streams}/chats/{chat_id}")
        _, number, _ = await chat.load()
        return await reconnect_response(chat.answer(number - 1) if number else None, include_closed=True)

    @app.post("/api/chat/{chat_id}/stop")
    async def stop(chat_id: ChatId) -> dict[str, bool]:
        chat = Chat(f"{streams}/chats/{chat_id}")
        _, number, _ = await chat.load()
        return {"stopped": number > 0 and await stop_generation(chat.answer(number - 1), "the user stopped it")}

    return app


async def is_being_written(chat: Chat, number: int) -> bool:
    try:
        return number >= 0 and not (await chat.answer(number).head()).closed
    except StreamNotFoundError:
        return False


def valid_id(chat_id: object) -> str:
    if not isinstance(chat_id, str) or not 0 < len(chat_id) <= 64 or not chat_id.replace("-", "").isalnum():
        raise HTTPException(422, "The id of a chat has up to 64 letters, digits and hyphens.")
    return chat_id


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", default="http://localhost:4437/v1/stream", help="where the streams are")
    parser.add_argument("--assets", type=Path, required=True, help="the directory with the bundled page.js")
    parser.add_argument("--port", type=int, default=8437)
    arguments = parser.parse_args()
    app = application(arguments.streams, arguments.assets)
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning", timeout_graceful_shutdown=2)


if __name__ == "__main__":
    main()
