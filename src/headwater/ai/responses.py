"""Responses of web frameworks on Starlette (FastAPI is one) that name a stream instead of carrying its content.

The contract is that of the official JavaScript transports: `Location` and a JSON body `{"streamUrl": …}`, with 201
while the generation runs, 200 when it was awaited or is resumed, and 204 when there is nothing to resume.
"""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any, Literal

from starlette.responses import JSONResponse, Response

from headwater.ai.generation import AI_SDK, JSON, LEASE_S, EventFormat, Generation, stream_at
from headwater.client import StreamNotFoundError
from headwater.client.asynchronous import AsyncStream


async def durable_response(
    source: AsyncIterable[Any],
    *,
    stream: AsyncStream | str,
    read_url: str | None = None,
    mode: Literal["immediate", "await"] = "immediate",
    event_format: EventFormat = AI_SDK,
    error_text: str = "The answer could not be generated.",
    content_type: str = JSON,
    close: bool = True,
    lease_s: float | None = LEASE_S,
) -> Response:
    """Write the events of `source` to a stream in the background, and answer with the address of the stream.

    `read_url` is the address for clients, if it differs from the one to write to (a proxy that checks who reads). With
    `mode="await"` the response is sent at the end, with the final offset. `close=False` leaves the stream open, for
    streams that hold a whole conversation. The lost connection of a client does not end the generation. If this process
    ends, the server appends the error event after `lease_s` and closes the stream; None leaves it open.
    """
    target = stream_at(stream) if isinstance(stream, str) else stream
    generation = Generation(
        source, target, event_format=event_format, error_text=error_text, close=close, lease_s=lease_s
    )
    await generation.start(content_type)
    address = read_url or target.url
    if mode == "await":
        offset = await generation.wait()
        return JSONResponse({"streamUrl": address, "finalOffset": offset}, 200, _headers(address))
    return JSONResponse({"streamUrl": address}, 201, _headers(address))


async def reconnect_response(
    stream: AsyncStream | str | None, *, read_url: str | None = None, include_closed: bool = False
) -> Response:
    """The answer to a client that asks whether there is a generation to resume: its address, or 204.

    With `include_closed` a generation that has ended is named too, for pages that have the question but not its answer:
    between their first request and this one, the answer may have been completed.
    """
    if stream is None:
        return Response(status_code=204)
    target = stream_at(stream) if isinstance(stream, str) else stream
    try:
        if (await target.head()).closed and not include_closed:
            return Response(status_code=204)
    except StreamNotFoundError:
        return Response(status_code=204)
    address = read_url or target.url
    return JSONResponse({"streamUrl": address}, 200, _headers(address))


def _headers(address: str) -> dict[str, str]:
    return {"Location": address, "Cache-Control": "no-store", "Access-Control-Expose-Headers": "Location"}
