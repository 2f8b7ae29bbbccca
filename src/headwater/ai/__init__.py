"""Durable responses for AI applications: model output is written to a stream, and browsers read it from there.

    from headwater.ai import durable_response

    @app.post("/api/chat")
    async def chat(request: Request):
        return await durable_response(answer(await request.json()), stream=f"{STREAMS}/answers/{uuid4()}")

The response names the stream (the contract of the official JavaScript transports), and a task writes to it. A reader
may reload, lose its network or open a second tab: the generation continues. Only `stop_generation` ends it early.
"""

from __future__ import annotations

from headwater.ai.generation import AG_UI, AI_SDK, EventFormat, Generation, shutdown, stop_generation, stream_at
from headwater.ai.responses import durable_response, reconnect_response

__all__ = [
    "AG_UI",
    "AI_SDK",
    "EventFormat",
    "Generation",
    "durable_response",
    "reconnect_response",
    "shutdown",
    "stop_generation",
    "stream_at",
]
