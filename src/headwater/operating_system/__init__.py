"""What differs between Linux and macOS: files, processors, memory, sockets, boot id, and the end of child processes.

All other packages use calls that both have; a test searches for others. `SYSTEM` is the one for this machine. What only
macOS has is passed in, so that its branch is tested on Linux too. It has not been run on macOS.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final, Protocol

from headwater.operating_system.die_with_parent import signal_at_death_of_parent
from headwater.operating_system.glibc import Glibc

SOCKET_PATH_MAX_BYTES: Final = 100
"""What fits into the address of a Unix socket everywhere: macOS takes 103 bytes, Linux 107."""
NO_BOOT_ID: Final = bytes(16)

_BOOT_ID_FILE: Final = Path("/proc/sys/kernel/random/boot_id")
_STATM: Final = Path("/proc/self/statm")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_F_FULLFSYNC: Final = 51
_TCP_KEEPALIVE: Final = 0x10
_TCP_RXT_CONNDROPTIME: Final = 0x80
_MACOS_OPEN_FILES: Final = 10_240
"""OPEN_MAX of macOS: it refuses a larger soft limit, although the hard limit says that there is none."""
_FALLOC_FL_KEEP_SIZE: Final = 1
_NOT_SUPPORTED: Final = frozenset((errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY))


class Allocator(Protocol):
    def free_bytes(self) -> int:
        """Bytes that the program has freed and the allocator keeps, resident or not."""

    def trim(self) -> None:
        """Return the resident ones to the operating system."""


class OperatingSystem(Protocol):
    @property
    def open_files_max(self) -> int | None:
        """The soft limit on open files cannot be raised beyond this; None if only the hard limit counts."""

    @property
    def has_workers(self) -> bool:
        """Several processes can serve: there are packet sockets, and a process can be made to die with its parent."""

    @property
    def has_process_descriptors(self) -> bool:
        """The end of a child process can be waited for with a selector."""

    def sync_data(self, descriptor: int) -> None:
        """Make the content and the size of a file durable."""

    def sync_file(self, descriptor: int) -> None:
        """Make a file or a directory durable."""

    def allocate(self, descriptor: int, offset: int, length: int) -> None:
        """Reserve blocks of the disk for a range that will be written. Only a hint: it never fails, and never changes
        the content or the size of the file."""

    def read_ahead(self, descriptor: int, offset: int, length: int) -> None:
        """Ask the system to read a range of a file soon. Only a hint: it never fails."""

    def boot_id(self) -> bytes:
        """16 bytes that change with a restart of the machine; all zero where they are not known."""

    def elapsed_s(self) -> float:
        """A clock that all processes of the machine share, and that also runs while the machine is suspended."""

    def processors(self) -> int:
        """How many processors this process may use."""

    def short_path(self, directory: Path) -> AbstractContextManager[str]:
        """A short path to a directory, for the address of a socket in it."""

    def allocator(self) -> Allocator | None:
        """The allocator of the C library; None if it does not report how much freed memory it keeps."""

    def resident_bytes(self) -> int:
        """The memory of this process that is in RAM."""

    def die_with_parent(self, signal_number: int) -> None:
        """Ask for the signal when the parent of this process ends. Only where `has_workers` is true."""

    def packet_pair(self) -> tuple[socket.socket, socket.socket]:
        """Two connected sockets that keep the boundaries of messages. Only where `has_workers` is true."""

    def process_descriptor(self, pid: int) -> int:
        """A descriptor that becomes readable when the process ends. Only where `has_process_descriptors` is true."""

    def detect_lost_peer(self, opened: socket.socket, idle_s: int, unanswered_s: int) -> None:
        """Let a TCP connection fail if its peer is silent after `idle_s` or does not acknowledge for `unanswered_s`."""


class Linux:
    open_files_max: Final = None
    has_workers: Final = True
    has_process_descriptors: Final = hasattr(os, "pidfd_open")

    def sync_data(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def sync_file(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def allocate(self, descriptor: int, offset: int, length: int) -> None:
        # `os.posix_fallocate` changes the size, and writes to every block where a file system cannot allocate.
        if (fallocate := _fallocate()) is not None:
            fallocate(descriptor, _FALLOC_FL_KEEP_SIZE, offset, length)

    def read_ahead(self, descriptor: int, offset: int, length: int) -> None:
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def boot_id(self) -> bytes:
        try:
            return bytes.fromhex(_BOOT_ID_FILE.read_text("ascii").strip().replace("-", ""))
        except (OSError, ValueError):
            return NO_BOOT_ID

    def elapsed_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def processors(self) -> int:
        return len(os.sched_getaffinity(0))

    @contextmanager
    def short_path(self, directory: Path) -> Iterator[str]:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)

    def allocator(self) -> Allocator | None:
        try:
            return Glibc() if _STATM.exists() else None
        except (AttributeError, OSError):
            return None

    def resident_bytes(self) -> int:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES

    def die_with_parent(self, signal_number: int) -> None:
        signal_at_death_of_parent(signal_number)

    def packet_pair(self) -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def process_descriptor(self, pid: int) -> int:
        return os.pidfd_open(pid)

    def detect_lost_peer(self, opened: socket.socket, idle_s: int, unanswered_s: int) -> None:
        _keep_alive(opened, socket.TCP_KEEPIDLE, idle_s)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unanswered_s * 1000)


class MacOS:
    """`fsync` of macOS leaves data in the cache of the drive; F_FULLFSYNC does not, where the file system has it."""

    open_files_max: Final = _MACOS_OPEN_FILES
    has_workers: Final = False
    has_process_descriptors: Final = False

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

    def allocate(self, descriptor: int, offset: int, length: int) -> None:
        """Without `fallocate`, the blocks are allocated when they are written."""

    def read_ahead(self, descriptor: int, offset: int, length: int) -> None:
        """Without `posix_fadvise`, the read itself fetches the range."""

    def boot_id(self) -> bytes:
        try:
            return uuid.UUID(self._boot_session().strip()).bytes
        except (OSError, ValueError, subprocess.SubprocessError):
            return NO_BOOT_ID

    def elapsed_s(self) -> float:
        # That of macOS runs then, too; `CLOCK_UPTIME_RAW` does not.
        return time.clock_gettime(time.CLOCK_MONOTONIC)

    def processors(self) -> int:
        return os.cpu_count() or 1

    @contextmanager
    def short_path(self, directory: Path) -> Iterator[str]:
        # Without /proc, use a link with a short name that only this user can access.
        with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as place:
            link = Path(place) / "d"
            link.symlink_to(directory.absolute())
            yield str(link)

    def allocator(self) -> Allocator | None:
        """The allocator of macOS returns memory without being asked."""
        return None

    def resident_bytes(self) -> int:
        raise NotImplementedError("Resident memory is not available on macOS: it has no /proc/self/statm.")

    def die_with_parent(self, signal_number: int) -> None:
        raise NotImplementedError(f"macOS cannot send signal {signal_number} at the end of a parent.")

    def packet_pair(self) -> tuple[socket.socket, socket.socket]:
        raise NotImplementedError("macOS has no packet sockets between processes.")

    def process_descriptor(self, pid: int) -> int:
        raise NotImplementedError(f"macOS has no descriptor for process {pid}.")

    def detect_lost_peer(self, opened: socket.socket, idle_s: int, unanswered_s: int) -> None:
        _keep_alive(opened, _TCP_KEEPALIVE, idle_s)
        opened.setsockopt(socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME, unanswered_s)


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """The function of the C library; None if it has none."""
    found = getattr(ctypes.CDLL(None), "fallocate", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return found


def _keep_alive(opened: socket.socket, idle_option: int, idle_s: int) -> None:
    """Three probes, one second apart, after `idle_s` without data."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((idle_option, idle_s), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
        opened.setsockopt(socket.IPPROTO_TCP, option, value)


def _boot_session() -> str:
    done = subprocess.run(
        ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout


SYSTEM: Final[OperatingSystem] = MacOS() if sys.platform == "darwin" else Linux()
