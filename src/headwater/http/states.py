"""States of a connection: one for reading requests, one for writing answers.

The two move independently, so pipelined requests and a disconnect are noticed while an answer is being sent. Every
change of state is an event that the tables below allow; any other is a `KeyError`, which is a bug.

Reading:

    idle      between requests
    head      the request line or the headers are arriving
    body      the body or its trailers are arriving
    refused   the rest of the input is discarded: a limit was exceeded or the syntax is wrong
    closed    the connection is closed

Writing:

    idle       no request is being answered
    serving    a handler has the request, or its result is not durable yet
    refusing   a request that was refused while it was being read is answered
    sending    a body is sent piece by piece
    live       a long-poll waits, or an event stream is open
    lingering  the last answer was sent; input is discarded until the client has closed
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
DONE: Final = "the answer is complete"
LINGER: Final = "the last answer was sent to a client that is still sending"

# Of both.
CLOSE: Final = "the connection is closed"

Transitions = Mapping[str, Mapping[str, str]]

READING: Final[Transitions] = {
    IDLE: {BEGIN: HEAD, REFUSE: REFUSED, CLOSE: CLOSED},
    HEAD: {HEAD_COMPLETE: BODY, BEGIN: HEAD, REFUSE: REFUSED, CLOSE: CLOSED},
    BODY: {REQUEST_COMPLETE: IDLE, BEGIN: HEAD, REFUSE: REFUSED, CLOSE: CLOSED},
    REFUSED: {REFUSE: REFUSED, CLOSE: CLOSED},
    CLOSED: {CLOSE: CLOSED},
}
"""`BEGIN` within a head or body: a request that offered an upgrade is read again without the offer."""

WRITING: Final[Transitions] = {
    IDLE: {TAKE: SERVING, TAKE_REFUSED: REFUSING, CLOSE: CLOSED},
    SERVING: {DONE: IDLE, SEND_PIECES: SENDING, GO_LIVE: LIVE, CLOSE: CLOSED},
    REFUSING: {LINGER: LINGERING, CLOSE: CLOSED},
    SENDING: {DONE: IDLE, CLOSE: CLOSED},
    LIVE: {DONE: IDLE, SEND_PIECES: SENDING, CLOSE: CLOSED},
    LINGERING: {CLOSE: CLOSED},
    CLOSED: {CLOSE: CLOSED},
}
