"""What differs between Linux and macOS, with the calls of macOS replaced by ones that Linux has."""

from __future__ import annotations

import ast
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import psutil
import pytest

import headwater
from headwater.cluster import start
from headwater.config import load_settings, sections
from headwater.config.sections import ServerSettings
from headwater.engine import freed_memory
from headwater.operating_system import (
    NO_BOOT_ID,
    SOCKET_PATH_MAX_BYTES,
    Linux,
    MacOS,
    OperatingSystem,
    die_with_parent,
)
from headwater.spark import home
from headwater.storage.interface import StorageError
from tests.ports import free_port
from tests.waiting import has_ended, wait_until

BOTH = pytest.mark.parametrize("system", [Linux(), MacOS(lambda *_: 0)], ids=["linux", "macos"])

LINUX_ONLY = {
    module: set(names.split())
    for module, names in {
        "os": "eventfd fdatasync copy_file_range getrandom getxattr memfd_create O_DIRECT O_NOATIME O_PATH O_TMPFILE"
        " pidfd_open pipe2 posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity sched_setscheduler setns"
        " setresuid setxattr splice timerfd_create unshare",
        "socket": "AF_NETLINK AF_PACKET AF_VSOCK SO_PEERCRED SO_REUSEPORT SOCK_CLOEXEC SOCK_NONBLOCK SOCK_SEQPACKET"
        " TCP_DEFER_ACCEPT TCP_KEEPIDLE TCP_QUICKACK TCP_USER_TIMEOUT",
        "signal": "SIGPWR SIGRTMAX SIGRTMIN pidfd_send_signal sigtimedwait sigwaitinfo",
        "select": "epoll",
        "mmap": "MADV_HUGEPAGE MAP_HUGETLB MAP_LOCKED MAP_POPULATE",
        "fcntl": "F_ADD_SEALS F_OFD_SETLK F_SETPIPE_SZ",
        "resource": "prlimit RLIMIT_RTPRIO",
        "time": "CLOCK_BOOTTIME CLOCK_TAI",
    }.items()
}
"""Names of the standard library that macOS does not have, or that do not work there as we would use them."""
PATHS_OF_LINUX = ("/proc/", "/sys/", "/dev/shm")
LIBRARY_CALLS_OF_LINUX = {"prctl", "malloc_trim", "mallinfo2", "syscall", "inotify_init"}
PACKAGE = "operating_system"


def linux_only_names(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if name in LINUX_ONLY.get(module, ()):
                found.add(f"{module}.{name}")
            case ast.Attribute(attr=name) if name in LIBRARY_CALLS_OF_LINUX:
                found.add(name)
            case ast.ImportFrom(module=str(module)):
                found.update(
                    f"{module}.{alias.name}" for alias in node.names if alias.name in LINUX_ONLY.get(module, ())
                )
            case ast.Constant(value=str(text)) if "\n" not in text:
                found.update(path for path in PATHS_OF_LINUX if text.startswith(path))
            case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
                found.update(path for path in PATHS_OF_LINUX if text.startswith(path))
    return found


def test_what_only_linux_has_is_used_in_one_package() -> None:
    package = Path(headwater.__file__).parent
    found = {
        str(path.relative_to(package)): names
        for path in sorted(package.rglob("*.py"))
        if (names := linux_only_names(path.read_text(encoding="utf-8")))
    }
    inside = {path: names for path, names in found.items() if path.startswith(f"{PACKAGE}/")}
    assert found == inside
    assert {"os.fdatasync", "os.pidfd_open", "socket.SOCK_SEQPACKET", "prctl"} <= set().union(*inside.values())


AS_ON_MACOS = """
import asyncio, fcntl, mmap, os, resource, select, signal, socket, sys, time
import httpx, lmdb, prometheus_client, pydantic, typer, uvloop, zoneinfo  # libraries that look at the platform
for module, names in {names!r}.items():
    for name in names:
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
sys.platform = "darwin"
from headwater.operating_system import SYSTEM, MacOS
assert isinstance(SYSTEM, MacOS)
from headwater.cli import main
main(sys.argv[1:])
"""
"""A program without the names that macOS does not have. F_FULLFSYNC is not a command of Linux: `fsync` follows it."""


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_durable_server_runs_without_the_names_of_linux(tmp_path: Path, mode: str) -> None:
    program = [sys.executable, "-c", AS_ON_MACOS.replace("{names!r}", repr(LINUX_ONLY))]
    port = free_port()
    place = ["--mode", mode, "--data-dir", str(tmp_path / "streams")]
    log = tmp_path / "log"
    with log.open("wb") as lines:
        command = [*program, "serve", "--port", str(port), *place]
        server = subprocess.Popen(command, cwd=tmp_path, stdout=lines, stderr=lines)
    try:
        wait_until(lambda: _responds(port) or server.poll() is not None, what="the server responds or has ended")
        assert server.poll() is None, log.read_text()
        stream = f"http://127.0.0.1:{port}/v1/stream/a"
        text = {"Content-Type": "text/plain"}
        assert httpx.put(stream, headers=text).status_code == 201
        assert httpx.post(stream, headers=text, content="x").status_code == 204
        assert httpx.get(stream, params={"offset": "-1"}).text == "x"
        _succeeds([*program, "store", "rotate-key", *place], tmp_path)  # asks the server over the control socket
    finally:
        server.terminate()
        server.wait(60)
    assert "are correct" in _succeeds([*program, "store", "check", *place], tmp_path)


def _succeeds(command: list[str], directory: Path) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _responds(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def test_names_of_linux_are_found_however_they_are_written() -> None:
    source = 'import os\nfrom socket import SOCK_NONBLOCK\nos.pipe2(0)\nopen(f"/proc/{1}")\nlibrary.prctl(1)\n'
    assert linux_only_names(source) == {"os.pipe2", "socket.SOCK_NONBLOCK", "/proc/", "prctl"}


@BOTH
def test_read_ahead_never_fails(tmp_path: Path, system: OperatingSystem) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"x" * 10_000)
        file.flush()
        system.read_ahead(file.fileno(), 0, 10_000)
        closed = os.dup(file.fileno())
    os.close(closed)
    system.read_ahead(closed, 0, 1)


def test_macos_serves_with_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (start, sections):
        monkeypatch.setattr(place, "SYSTEM", MacOS())
    assert ServerSettings(workers=0).worker_count == 1, "auto"
    settings = load_settings(None, None, {"DS_SERVER__WORKERS": "2"}, tmp_path).settings
    with pytest.raises(StorageError, match=r"server\.workers is 2: .* one worker only"):
        start.start_server(settings, lambda: settings)


def test_macos_syncs_through_the_cache_of_the_drive(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []

    def control(descriptor: int, command: int) -> int:
        calls.append((descriptor, command))
        return 0

    system = MacOS(control)
    with (tmp_path / "file").open("wb") as file:
        system.sync_data(file.fileno())
        system.sync_file(file.fileno())
        assert calls == [(file.fileno(), 51)] * 2


@BOTH
def test_allocating_changes_neither_size_nor_content_and_never_fails(system: OperatingSystem, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    with path.open("r+b") as file:
        system.allocate(file.fileno(), 0, 2**20)
        status = os.fstat(file.fileno())
    assert path.read_bytes() == b"abc"
    assert (512 * status.st_blocks >= 2**20) == isinstance(system, Linux)
    system.allocate(-1, 0, 2**20)


def test_macos_falls_back_to_fsync_where_the_file_system_has_nothing_stronger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)

    def refuse(code: int) -> OperatingSystem:
        def control(descriptor: int, command: int) -> int:
            raise OSError(code, os.strerror(code))

        return MacOS(control)

    refuse(errno.ENOTSUP).sync_data(7)
    assert synced == [7]
    with pytest.raises(OSError, match="Input/output"):
        refuse(errno.EIO).sync_data(7)
    assert synced == [7], "a failed sync must not be hidden by another one"


def test_boot_id_is_sixteen_bytes_or_unknown() -> None:
    session = "1B2C3D4E-0000-4000-8000-0123456789AB"
    assert MacOS(boot_session=lambda: f"{session}\n").boot_id().hex() == session.replace("-", "").lower()
    assert MacOS(boot_session=lambda: "nonsense").boot_id() == NO_BOOT_ID
    assert MacOS().boot_id() == NO_BOOT_ID, "there is no sysctl for it here"
    assert len(Linux().boot_id()) == 16


@BOTH
def test_socket_in_a_directory_with_a_long_path_can_be_reached(tmp_path: Path, system: OperatingSystem) -> None:
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    with system.short_path(directory) as short:
        address = f"{short}/control.sock"
        assert len(address) <= SOCKET_PATH_MAX_BYTES
        with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as client:
            listening.bind(address)
            listening.listen(1)
            client.connect(address)
    assert (directory / "control.sock").exists()


@BOTH
def test_elapsed_time_is_that_of_the_machine(system: OperatingSystem) -> None:
    first_s = system.elapsed_s()
    assert time.monotonic() <= first_s + 1, "with the time for which the machine was suspended"
    assert system.elapsed_s() >= first_s


@BOTH
def test_processors_are_counted(system: OperatingSystem) -> None:
    assert 1 <= system.processors() <= (os.cpu_count() or 1)


def test_linux_returns_freed_memory_and_macos_is_not_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Linux().allocator()
    assert allocator is not None, "these tests run with glibc"
    assert allocator.free_bytes() >= 0
    # A little more or less may be resident a moment later.
    assert Linux().resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert MacOS().allocator() is None
    monkeypatch.setattr(freed_memory, "SYSTEM", MacOS())
    assert freed_memory.memory_return() is None


_REUSE = """
import resource
from headwater.operating_system import SYSTEM

def page_faults_of(bodies):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [b"x" * 2**20 for _ in range(bodies)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

allocator = SYSTEM.allocator()
first, second = page_faults_of(48), page_faults_of(48)
allocator.trim()
print(first, second, page_faults_of(48))
"""


def test_memory_that_a_checkpoint_frees_is_used_again_without_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", _REUSE], capture_output=True, text=True, check=True, timeout=60)
    first, second, after_trim = map(int, done.stdout.split())
    assert second < first / 10, "the freed memory was returned to the system, and is mapped again"
    assert after_trim > first / 2, "a trim returns it"


def test_packets_keep_their_boundaries() -> None:
    ours, theirs = Linux().packet_pair()
    with ours, theirs:
        ours.send(b"one")
        ours.send(b"two")
        assert (theirs.recv(100), theirs.recv(100)) == (b"one", b"two")
        ours.close()
        assert theirs.recv(100) == b"", "the end of the other process is seen"


def test_process_descriptor_becomes_readable_at_the_end_of_the_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        descriptor = Linux().process_descriptor(child.pid)
        try:
            assert select.select([descriptor], [], [], 0)[0] == []
            assert child.stdin is not None
            child.stdin.close()
            assert select.select([descriptor], [], [], 60)[0] == [descriptor]
        finally:
            os.close(descriptor)


def test_macos_starts_spark_without_the_process_that_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "SYSTEM", MacOS())
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    home.start_prefork(tmp_path)
    assert "PYSPARK_PYTHON" not in os.environ
    assert list(tmp_path.iterdir()) == []


def test_macos_refuses_what_only_several_workers_need() -> None:
    system = MacOS()
    assert not system.has_workers
    assert not system.has_process_descriptors
    for refused in (
        system.packet_pair,
        system.resident_bytes,
        lambda: system.die_with_parent(signal.SIGKILL),
        lambda: system.process_descriptor(os.getpid()),
    ):
        with pytest.raises(NotImplementedError, match="macOS"):
            refused()


class OptionRecorder(socket.socket):
    """A socket that accepts every option, also those that only another system has."""

    def __init__(self) -> None:
        super().__init__()
        self.options: set[tuple[int, int, int]] = set()

    def setsockopt(self, *option: int) -> None:  # type: ignore[override]
        self.options.add(option)  # type: ignore[arg-type]


def test_lost_peers_are_detected_with_the_options_of_the_system() -> None:
    with socket.socket() as opened:
        Linux().detect_lost_peer(opened, 2, 5)
        tcp = socket.IPPROTO_TCP
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert opened.getsockopt(tcp, socket.TCP_KEEPIDLE) == 2
        assert opened.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 5000
    with OptionRecorder() as recorder:
        MacOS().detect_lost_peer(recorder, 2, 5)
        # The numbers of macOS' <netinet/tcp.h>: TCP_KEEPALIVE and TCP_RXT_CONNDROPTIME, both in seconds.
        assert {(tcp, 0x10, 2), (tcp, 0x80, 5), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)} <= recorder.options


def test_macos_has_a_limit_on_open_files_that_linux_has_not() -> None:
    assert MacOS().open_files_max == 10_240
    assert Linux().open_files_max is None


def test_watched_program_ends_with_its_parent() -> None:
    """The way of macOS: a process that stays between the parent and the program."""
    script = textwrap.dedent(
        """
        import os, sys, time
        sys.path.insert(0, sys.argv[1])
        import die_with_parent
        parent = os.getpid()
        if os.fork() == 0:
            command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
            sys.exit(die_with_parent.run_and_watch(command, parent, 9))
        time.sleep(600)
        """
    )
    directory = str(Path(die_with_parent.__file__).parent)
    parent = subprocess.Popen([sys.executable, "-c", script, directory], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    program = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: has_ended(program), what="the program has ended")
    parent.stdout.close()
