"""Messages between the supervisor and a worker, over a socket pair that is created when the worker starts.

Each is one packet with a JSON object, and some carry file descriptors.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from headwater.operating_system import SYSTEM

PACKET_MAX_BYTES: Final = 64 * 1024
_DESCRIPTORS_MAX: Final = 4


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """From a worker: it has recovered its data and can be connected to the others."""

    address: str = ""
    """In a cluster: where the workers of other nodes reach it."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From a worker: it can serve."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """From a worker that cannot start: the reason."""

    kind: str
    message: str


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """To a worker, with two descriptors: connections to another worker, for frames and for clients' connections."""

    worker: int


class NotConnected(msgspec.Struct, frozen=True, tag="not-connected"):
    """From a worker that could not use such descriptors: connect it to the other worker again, a little later."""

    worker: int


class ConnectStandby(msgspec.Struct, frozen=True, tag="connect-standby"):
    """To the owner of a shard, with a descriptor: a connection to a standby of the same node, which serves reads."""

    shard: int


class ConnectReader(msgspec.Struct, frozen=True, tag="connect-reader"):
    """To a standby, with a descriptor: the other end of that connection."""

    worker: int


class Serve(msgspec.Struct, frozen=True, tag="serve"):
    """To a worker: accept connections."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """To a worker, which must answer."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """From a worker."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """To a worker: accept no more connections, complete requests in progress, but still respond to other workers."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """From a worker: it has no more connections, and nothing is queued."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """To a worker: close the storage and exit."""


class Reload(msgspec.Struct, frozen=True, tag="reload"):
    """To a worker: read certificate, authorities and log levels again."""


class ShardLease(msgspec.Struct, frozen=True, tag="lease"):
    """To a worker of a cluster: until when its shard is its own, and where the other shards are."""

    until_s: float
    owners: dict[int, tuple[int, str]]
    """The epoch and the address of each."""


class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """From a standby: it has the state of its shard, and can take it over at once."""


class TakeOver(msgspec.Struct, frozen=True, tag="take-over"):
    """To a standby, after the lease: its shard is its own now."""

    epoch: int


Message: TypeAlias = (
    Hello
    | Ready
    | Failed
    | Connect
    | NotConnected
    | ConnectStandby
    | ConnectReader
    | Serve
    | Ping
    | Pong
    | Drain
    | Drained
    | Stop
    | Reload
    | ShardLease
    | Warm
    | TakeOver
)

_decode: Final = msgspec.json.Decoder(Message).decode
_encode: Final = msgspec.json.Encoder().encode


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a control connection."""
    ends = SYSTEM.packet_pair()
    for end in ends:
        end.setblocking(False)
    return ends


def send(control: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> bool:
    """Send a message; False if the other side has exited or does not read."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    try:
        control.sendmsg([_encode(message)], rights)
    except OSError:
        return False
    return True


def receive(control: socket.socket) -> tuple[Message, list[int]] | None:
    """The next message with its descriptors; None at the end. Raises `BlockingIOError` if there is none yet."""
    try:
        data, descriptors, _, _ = socket.recv_fds(control, PACKET_MAX_BYTES, _DESCRIPTORS_MAX)
    except ConnectionError:
        return None
    if not data:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return _decode(data), list(descriptors)
