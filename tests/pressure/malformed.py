"""Malformed requests, parsed by the server and by h11: they must agree on what is a request.

A server that sees requests where another parser sees none is vulnerable to request smuggling. So for each mutation the
server may reject what h11 accepts, but it must never respond to more requests than h11 parses, nor keep the connection
open where h11 finds an error.
"""

from __future__ import annotations

import random
import socket

import h11

from tests.pressure.fuzz import Replies
from tests.pressure.script import Mismatch

SENTINEL = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
_HOST = b"\r\nHost: localhost\r\n"
_INSERTS = (b"\r", b"\n", b"\r\n", b" ", b"\t", b"\0", b":", b",", b"\x80", b"chunked", b"0\r\n\r\n")
_FIELDS = (
    b"Content-Length: 3\r\n",
    b"Content-Length: +3\r\n",
    b"Content-Length: 3, 3\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: identity\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding : chunked\r\n",
    b"Transfer-Encoding:\r\n chunked\r\n",
    b"Transfer-Encoding: xchunked\r\n",
    b"Host: other\r\n",
    b" folded: x\r\n",
    b"Connection: close\r\n",
)


def mutate(dice: random.Random) -> bytes:
    """A request with a body, with one to three mutations."""
    body = b"abc"
    if dice.random() < 0.5:
        framing, payload = b"Content-Length: 3\r\n", body
    else:
        framing, payload = b"Transfer-Encoding: chunked\r\n", b"3\r\nabc\r\n0\r\n\r\n"
    head = b"POST /v1/stream/malformed HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n" + framing
    data = bytearray(head + b"\r\n" + payload)
    for _ in range(dice.choice((1, 1, 2, 3))):
        # Not in the request line, in which a server may tolerate blanks (RFC 9112 §3), nor in Host: a request without
        # one is rejected and the connection stays open, which h11 does not distinguish from bad framing.
        at = dice.randrange(data.find(_HOST) + len(_HOST), len(data))
        way = dice.randrange(5)
        if way == 0:
            data[at : at + 1] = b""
        elif way == 1:
            data[at:at] = dice.choice(_INSERTS)
        elif way == 2:
            data[at] = dice.randrange(256)
        elif way == 3:
            lines = bytes(data).split(b"\r\n")
            lines.insert(dice.randrange(2, 5), dice.choice(_FIELDS).removesuffix(b"\r\n"))
            data = bytearray(b"\r\n".join(lines))
        else:
            data[at:at] = data[max(0, at - dice.randrange(1, 20)) : at]
    return bytes(data)


def read_by_h11(data: bytes) -> int:
    """How many requests a server built on h11 parses before an error or the end."""
    requests = 0
    while data:
        server = h11.Connection(h11.SERVER)
        server.receive_data(data)
        try:
            while not isinstance(event := server.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    return requests
        except h11.RemoteProtocolError:
            return requests
        requests += 1
        if server.their_state is h11.MUST_CLOSE:
            return requests
        # Empty lines before a request are ignored (RFC 9112 §2.2); h11 does not.
        data = server.trailing_data[0].lstrip(b"\r\n")
    return requests


def read_by_server(port: int, data: bytes) -> int:
    """How many requests the server responds to, not counting a response with `close`."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        replies = Replies()
        try:
            while received := connection.recv(65_536):
                replies.feed(received)
        except ConnectionResetError:
            pass
    requests = 0
    while (reply := replies.next("POST")) is not None and not reply.ends:
        requests += 1
    return requests


def check(port: int, mutations: int, seed: int) -> int:
    """Compare both parsers; returns how many mutated requests were accepted by both."""
    dice = random.Random(seed)
    accepted = 0
    for number in range(mutations):
        data = mutate(dice) + SENTINEL
        here, there = read_by_server(port, data), read_by_h11(data)
        if here > there:
            raise Mismatch(f"mutation {number} of seed {seed}: {here} requests here, {there} for h11: {data!r}")
        accepted += here == there > 0
    return accepted
