"""States of a connection: one for reading requests, one for writing responses.

The two change independently, so pipelined requests and a disconnect are noticed while a response is being sent. Every
change of state is an event in the tables below; any other event is a `KeyError`, which is a bug. Only the paths of
repeated requests, which begin in a known state, use transitions that are looked up once, at the end of this module.

Reading:

    idle      between requests
    head      the request line or the headers are arriving
    body      the body or its trailers are arriving
    refused   the rest of the input is discarded: a limit was exceeded or the syntax is wrong
    closed    the connection is closed

Writing:

    idle       no request is being processed
    serving    a handler has the request, or its result is not durable yet
    refusing   the refusal of a request that was not read completely is being sent
    sending    a body is sent in pieces
    live       a long-poll waits, or an event stream is open
    lingering  the last response was sent; input is discarded until the client closes
    closed     the connection is closed
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# States. Plain strings: they are interned and hash without running Python code.
IDLE: Final = "idle"
HEAD: Final = "head"
BODY: Final = "body"
REFUSED: Final = "refused"
SERVING: Final = "serving"
REFUSING: Final = "refusing"
SENDING: Final = "sending"
LIVE: Final = "live"
LINGERING: Final = "lingering"
CLOSED: Final = "closed"

# Events of the reading side.
BEGIN: Final = "a request begins"
HEAD_COMPLETE: Final = "the head is complete"
REQUEST_COMPLETE: Final = "the request is complete"
REFUSE: Final = "the request is refused"

# Events of the writing side.
TAKE: Final = "a request is taken from the queue"
TAKE_REFUSED: Final = "a request that was refused is taken"
SEND_PIECES: Final = "the handler returned a body in pieces"
GO_LIVE: Final = "the handler returned a live response"
DONE: Final = "the response is complete"
LINGER: Final = "the last response was sent to a client that is still sending"

# Events of both sides.
CLOSE: Final = "the connection is closed"

Transitions = Mapping[str, Mapping[str, str]]

READING: Final[Transitions] = {
    IDLE: {BEGIN: HEAD, REFUSE: REFUSED, CLOSE: CLOSED},
    HEAD: {HEAD_COMPLETE: BODY, BEGIN: HEAD, REFUSE: REFUSED, CLOSE: CLOSED},
    BODY: {REQUEST_COMPLETE: IDLE, BEGIN: HEAD, REFUSE: REFUSED, CLOSE: CLOSED},
    REFUSED: {REFUSE: REFUSED, CLOSE: CLOSED},
    CLOSED: {CLOSE: CLOSED},
}
"""`BEGIN` within a head or body: a request that offered an upgrade is parsed again without the offer."""

WRITING: Final[Transitions] = {
    IDLE: {TAKE: SERVING, TAKE_REFUSED: REFUSING, CLOSE: CLOSED},
    SERVING: {DONE: IDLE, SEND_PIECES: SENDING, GO_LIVE: LIVE, CLOSE: CLOSED},
    REFUSING: {LINGER: LINGERING, CLOSE: CLOSED},
    SENDING: {DONE: IDLE, CLOSE: CLOSED},
    LIVE: {DONE: IDLE, SEND_PIECES: SENDING, CLOSE: CLOSED},
    LINGERING: {CLOSE: CLOSED},
    CLOSED: {CLOSE: CLOSED},
}

# The transitions of a repeated request, which is taken while the connection is idle.
TAKEN: Final = WRITING[IDLE][TAKE]
ANSWERED: Final = WRITING[TAKEN][DONE]
RELAYED: Final = WRITING[TAKEN][GO_LIVE]
