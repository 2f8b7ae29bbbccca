"""What differs between Linux and macOS, with the calls of macOS replaced by ones that Linux has."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from headwater.operating_system import NO_BOOT_ID, SOCKET_PATH_MAX_BYTES, Linux, MacOS, OperatingSystem
from headwater.stack import die_with_parent
from tests.waiting import wait_until

BOTH = pytest.mark.parametrize("system", [Linux(), MacOS(lambda *_: 0)], ids=["linux", "macos"])


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
def test_processors_are_counted(system: OperatingSystem) -> None:
    assert 1 <= system.processors() <= (os.cpu_count() or 1)


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
    wait_until(lambda: not program.is_running() or program.status() == psutil.STATUS_ZOMBIE)
    parent.stdout.close()
