"""What can go wrong between a client and a server, beside the network itself (that is `httpx.TransportError`)."""

from __future__ import annotations

import httpx
import msgspec


class ClientError(Exception):
    """The base of all errors here."""


class MalformedAnswer(ClientError):
    """An answer that is not what the protocol says: cut short, or framed wrongly. Nothing of it may be used."""


class HistoryMissing(ClientError):
    """Retention has dropped messages that no snapshot covers: the state of the stream cannot be built."""


class NoEvents(ClientError):
    """Server-sent events are not to be had here: read by long-poll."""


class Refused(ClientError):
    """The server turned the request down."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(f"{status} {code}: {detail}" if code else f"{status}: {detail}")
        self.status = status
        self.code = code


class StreamMissing(Refused):
    """There is no such stream, or no longer."""


class OffsetGone(Refused):
    """The offset lies before the earliest retained one: bootstrap again."""


class _Problem(msgspec.Struct):
    code: str = ""
    detail: str = ""


def check(response: httpx.Response, *expected: int) -> None:
    """Raise what an answer says, unless its status is an expected one. The body of a refusal is read."""
    if response.status_code in expected:
        return
    body = response.read()
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except msgspec.MsgspecError:
        problem = _Problem(detail=body[:200].decode("utf-8", "replace"))
    status = response.status_code
    if status == 404 or (status == 410 and problem.code == "stream_deleted"):
        raise StreamMissing(status, problem.code, problem.detail)
    if status == 410:
        raise OffsetGone(status, problem.code, problem.detail)
    raise Refused(status, problem.code, problem.detail)
