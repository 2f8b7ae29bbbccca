"""What differs between Linux and macOS: syncing, boot id, socket paths, open files, processors, read-ahead, workers.

Everything else uses calls that both have; a test searches for others. `SYSTEM` is the one for this machine. What only
macOS has is passed in, so that its branch is tested on Linux too. It has not been run on macOS.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

SOCKET_PATH_MAX_BYTES: Final = 100
"""What fits into the address of a Unix socket everywhere: macOS takes 103 bytes, Linux 107."""
NO_BOOT_ID: Final = bytes(16)

_BOOT_ID_FILE: Final = Path("/proc/sys/kernel/random/boot_id")
_F_FULLFSYNC: Final = 51
_MACOS_OPEN_FILES: Final = 10_240
"""OPEN_MAX of macOS: it refuses a larger soft limit, although the hard limit says that there is none."""
_NOT_SUPPORTED: Final = frozenset((errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY))


class OperatingSystem(Protocol):
    @property
    def open_files_max(self) -> int | None:
        """The soft limit on open files cannot be raised beyond this; None if only the hard limit counts."""

    @property
    def has_workers(self) -> bool:
        """Several processes can serve: there are packet sockets, and a process can be made to die with its parent."""

    def sync_data(self, descriptor: int) -> None:
        """Make the content and the size of a file durable."""

    def sync_file(self, descriptor: int) -> None:
        """Make a file or a directory durable."""

    def read_ahead(self, descriptor: int, offset: int, length: int) -> None:
        """Ask the system to read a range of a file soon. Only a hint: it never fails."""

    def boot_id(self) -> bytes:
        """16 bytes that change with a restart of the machine; all zero where they are not known."""

    def processors(self) -> int:
        """How many processors this process may use."""

    def short_path(self, directory: Path) -> AbstractContextManager[str]:
        """A short path to a directory, for the address of a socket in it."""


class Linux:
    open_files_max: Final = None
    has_workers: Final = True

    def sync_data(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def sync_file(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def read_ahead(self, descriptor: int, offset: int, length: int) -> None:
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def boot_id(self) -> bytes:
        try:
            return bytes.fromhex(_BOOT_ID_FILE.read_text("ascii").strip().replace("-", ""))
        except (OSError, ValueError):
            return NO_BOOT_ID

    def processors(self) -> int:
        return len(os.sched_getaffinity(0))

    @contextmanager
    def short_path(self, directory: Path) -> Iterator[str]:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)


class MacOS:
    """`fsync` of macOS leaves data in the cache of the drive; F_FULLFSYNC does not, where the file system has it."""

    open_files_max: Final = _MACOS_OPEN_FILES
    has_workers: Final = False

    def __init__(
        self,
        control: Callable[[int, int], int] = fcntl.fcntl,
        boot_session: Callable[[], str] | None = None,
    ) -> None:
        self._control = control
        self._boot_session = boot_session if boot_session is not None else _boot_session

    def sync_data(self, descriptor: int) -> None:
        self.sync_file(descriptor)

    def sync_file(self, descriptor: int) -> None:
        try:
            self._control(descriptor, _F_FULLFSYNC)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            # Network and foreign file systems: there is nothing stronger.
            os.fsync(descriptor)

    def read_ahead(self, descriptor: int, offset: int, length: int) -> None:
        """Without `posix_fadvise`, the read itself fetches the range."""

    def boot_id(self) -> bytes:
        try:
            return uuid.UUID(self._boot_session().strip()).bytes
        except (OSError, ValueError, subprocess.SubprocessError):
            return NO_BOOT_ID

    def processors(self) -> int:
        return os.cpu_count() or 1

    @contextmanager
    def short_path(self, directory: Path) -> Iterator[str]:
        # Without /proc, use a link with a short name that only this user can access.
        with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as place:
            link = Path(place) / "d"
            link.symlink_to(directory.absolute())
            yield str(link)


def _boot_session() -> str:
    done = subprocess.run(
        ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout


SYSTEM: Final[OperatingSystem] = MacOS() if sys.platform == "darwin" else Linux()
