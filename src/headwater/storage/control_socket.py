"""The control socket of a data directory: commands to a running server that no HTTP client may give.

It is a Unix socket beside the data with mode 0600, so a process that can connect could read the data anyway, and
nothing from a network reaches it. Requests and answers are one JSON object a line; see `engine.control`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

NAME: Final = "control.sock"
LINE_MAX_BYTES: Final = 64 * 1024

_ADDRESS_MAX_BYTES: Final = 100
"""What fits into a socket's address everywhere; Linux takes 107."""


def listening_socket(directory: Path) -> socket.socket:
    """A new control socket in a directory that this process has locked. Raises OSError where there can be none."""
    with suppress(FileNotFoundError):
        # Left by a process that was killed; the lock shows that it has ended.
        (directory / NAME).unlink()
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(directory) as address:
            opened.bind(address)
        # No process can connect before it listens, so it is never open to others.
        (directory / NAME).chmod(0o600)
        opened.listen(16)
        opened.setblocking(False)
    except BaseException:
        opened.close()
        raise
    return opened


def connect(directory: Path, timeout_s: float) -> socket.socket | None:
    """A connection to the server that has this directory open, or None when there is none."""
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    opened.settimeout(timeout_s)
    try:
        with _address(directory) as address:
            opened.connect(address)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        opened.close()
        return None
    except BaseException:
        opened.close()
        raise
    return opened


def remove(directory: Path) -> None:
    with suppress(OSError):
        (directory / NAME).unlink()


@contextmanager
def _address(directory: Path) -> Iterator[str]:
    """The socket's path; by way of an open directory where the path itself is too long for a socket."""
    path = directory / NAME
    if len(os.fsencode(path)) <= _ADDRESS_MAX_BYTES:
        yield str(path)
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{NAME}"
    finally:
        os.close(descriptor)
