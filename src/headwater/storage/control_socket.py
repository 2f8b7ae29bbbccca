"""The control socket of a data directory: commands to a running server that HTTP clients may not send.

It is a Unix socket in the data directory with mode 0600: a process that can connect to it could read the data anyway,
and it cannot be reached from a network. Requests and responses are one JSON object per line; see `engine.control`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from headwater.operating_system import SOCKET_PATH_MAX_BYTES, SYSTEM

NAME: Final = "control.sock"
LINE_MAX_BYTES: Final = 64 * 1024


def listening_socket(directory: Path) -> socket.socket:
    """Create a control socket in a directory that this process has locked. Raises OSError if that is not possible."""
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
    """Connect to the server that has this directory open; None if there is none."""
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
    """The socket's path, or a shorter one if it is too long for an address."""
    path = directory / NAME
    if len(os.fsencode(path)) <= SOCKET_PATH_MAX_BYTES:
        yield str(path)
        return
    with SYSTEM.short_path(directory) as short:
        yield f"{short}/{NAME}"
