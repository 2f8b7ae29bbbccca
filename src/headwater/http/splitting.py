"""Split large JSON bodies into messages before the engine is called, in turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwater.core.content import Messages, is_json
from headwater.core.errors import Refusal
from headwater.core.json_steps import needs_steps, split_json_in_steps
from headwater.http.context import Context
from headwater.http.request import Request

Done = Callable[[Any], None]


def with_messages(
    context: Context, request: Request, begin: Callable[[Messages | None, Done], None], *, creating: bool = False
) -> Callable[[Done], None]:
    """Call `begin` with the messages of the body, or with None if the body is small enough for the engine to split."""
    if not _is_large_json(request):
        return lambda done: begin(None, done)
    limits = context.limits
    steps = split_json_in_steps(
        request.body,
        max_messages=limits.max_append_messages,
        max_message_bytes=limits.max_json_message_bytes,
        allow_empty=creating,
    )

    def start(done: Done) -> None:
        def step() -> None:
            try:
                next(steps)
            except StopIteration as finished:
                _begin(begin, finished.value, done)
            except Refusal as refusal:
                done(refusal)
            else:
                context.turns.schedule(step)

        context.turns.schedule(step)

    return start


def _begin(begin: Callable[[Messages | None, Done], None], messages: Messages, done: Done) -> None:
    try:
        begin(messages, done)
    except Refusal as refusal:
        done(refusal)


def _is_large_json(request: Request) -> bool:
    content_type = request.headers.get(b"content-type")
    return content_type is not None and is_json(content_type.decode("latin-1")) and needs_steps(request.body)
