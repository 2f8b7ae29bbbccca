"""Sources of events for `durable_response`: streams of model and agent libraries as plain JSON values.

The libraries are not imported: their objects are recognized by the attributes that their documentation names.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from headwater.client.sse import SseParser

_DONE: Final = b"[DONE]"


async def from_sse(source: AsyncIterable[str | bytes]) -> AsyncIterator[Any]:
    """The JSON values of server-sent events: of pydantic-ai's `encode_stream`, or of any endpoint that sends events."""
    parser = SseParser()
    async for piece in source:
        for event in parser.feed(piece.encode() if isinstance(piece, str) else piece):
            if event.data.strip() != _DONE:
                yield msgspec.json.decode(event.data)


async def from_langgraph(source: AsyncIterable[Any], *, mode: str = "updates") -> AsyncIterator[dict[str, Any]]:
    """The output of a LangGraph graph's `astream` as `{"event": mode, "data": …}`, with `namespace` for subgraphs.

    `mode` is the `stream_mode` that was asked for, if it was a single one: LangGraph names the mode only among several.
    """
    async for item in source:
        namespace: Any = None
        found, data = mode, item
        if isinstance(item, tuple) and len(item) == 3:
            namespace, found, data = item
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            found, data = item
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], tuple):
            namespace, data = item
        event = {"event": found, "data": plain(data)}
        if namespace:
            event["namespace"] = list(namespace)
        yield event


def plain(value: Any) -> Any:
    """A value that JSON can hold: models are dumped, and what has no JSON form becomes text."""
    return msgspec.to_builtins(value, enc_hook=_dumped, str_keys=True)


def _dumped(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if dump is not None else str(value)


@dataclass(slots=True)
class _ToolCall:
    tool_call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def input(self) -> Any:
        text = "".join(self.pieces)
        try:
            return msgspec.json.decode(text) if text else {}
        except msgspec.DecodeError:
            return text


async def from_openai(source: AsyncIterable[Any], *, message_id: str | None = None) -> AsyncIterator[dict[str, Any]]:
    """Chunks of an OpenAI-compatible chat completion as UI message chunks of the Vercel AI SDK.

    Takes the objects of the `openai` package, or their JSON from any endpoint that speaks the same.
    """
    yield {"type": "start", "messageId": message_id or uuid.uuid4().hex}
    yield {"type": "start-step"}
    open_part = _OpenPart()
    tools: dict[int, _ToolCall] = {}
    finish_reason: str | None = None
    async for chunk in source:
        choices = _member(chunk, "choices") or ()
        if not choices:
            continue
        delta = _member(choices[0], "delta")
        finish_reason = _member(choices[0], "finish_reason") or finish_reason
        for kind, text in (
            ("reasoning", _member(delta, "reasoning_content") or _member(delta, "reasoning")),
            ("text", _member(delta, "content")),
        ):
            if isinstance(text, str) and text:
                for event in open_part.write(kind, text):
                    yield event
        for call in _member(delta, "tool_calls") or ():
            for event in open_part.end():
                yield event
            for event in _tool_events(tools, call):
                yield event
    for event in open_part.end():
        yield event
    for tool in tools.values():
        yield {
            "type": "tool-input-available",
            "toolCallId": tool.tool_call_id,
            "toolName": tool.name,
            "input": tool.input,
        }
    yield {"type": "finish-step"}
    yield {"type": "finish", "finishReason": _FINISH_REASONS.get(finish_reason or "", "other")}


_FINISH_REASONS: Final = {
    "stop": "stop",
    "length": "length",
    "content_filter": "content-filter",
    "tool_calls": "tool-calls",
    "function_call": "tool-calls",
}


class _OpenPart:
    """The text or reasoning that is being written. A part ends when another kind begins."""

    def __init__(self) -> None:
        self._kind = ""
        self._id = ""
        self._count = 0

    def write(self, kind: str, text: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if kind != self._kind:
            events += self.end()
            self._count += 1
            self._kind, self._id = kind, f"{kind}-{self._count}"
            events.append({"type": f"{kind}-start", "id": self._id})
        events.append({"type": f"{kind}-delta", "id": self._id, "delta": text})
        return events

    def end(self) -> list[dict[str, Any]]:
        if not self._kind:
            return []
        ended = {"type": f"{self._kind}-end", "id": self._id}
        self._kind = ""
        return [ended]


def _tool_events(tools: dict[int, _ToolCall], call: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    index, function = _member(call, "index") or 0, _member(call, "function")
    tool = tools.get(index)
    if tool is None:
        tool = tools[index] = _ToolCall(_member(call, "id") or uuid.uuid4().hex, _member(function, "name") or "")
        events.append({"type": "tool-input-start", "toolCallId": tool.tool_call_id, "toolName": tool.name})
    piece = _member(function, "arguments")
    if piece:
        tool.pieces.append(piece)
        events.append({"type": "tool-input-delta", "toolCallId": tool.tool_call_id, "inputTextDelta": piece})
    return events


def _member(value: Any, name: str) -> Any:
    """A member of an object of a library, or of its JSON."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
