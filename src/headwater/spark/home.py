"""A Spark home whose Python processes start quickly.

Spark puts `pyspark.zip` first on the path of every Python process that it starts. Python does not cache the compiled
modules of an archive, so each process compiles them again: more than a second of CPU time, where the installed package
takes a third of a second. On a busy machine that decides whether a process starts within Spark's limit of ten seconds.
The home made here has links to the programs and jars of the installed PySpark, and no archive, so the processes import
the installed package. Python processes are forked from one that has imported it (`prefork.py`), and the JVM maps its
classes from an archive (`class_archive.py`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from headwater.operating_system import SYSTEM
from headwater.spark.class_archive import ClassArchive, class_archive

log = logging.getLogger("headwater.spark")

SOCKET_VARIABLE: Final = "HEADWATER_PREFORK_SOCKET"
"""Where `forked_python.py` finds the process to fork."""

PRELOADED: Final = (
    "pandas",  # pyarrow imports it when it makes its first array.
    "pyspark.worker",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark_headwater",
    "headwater.spark.stream_reader",
    "headwater.spark.writer",
    "headwater.pipeline.postgres_source",
    "headwater.pipeline.postgres_writer",
)
"""What Spark's processes import. A module that is not installed is left out."""

_PROGRAM: Final = "python3"
_LINKED: Final = ("bin", "jars", "sbin", "RELEASE")


def use_quick_home(master: str) -> ClassArchive | None:
    """Use such a home for a Spark that this process starts on this machine, unless SPARK_HOME is set.

    Do nothing on a cluster, whose nodes have their own homes, or if the directory cannot be created. Returns the
    archive of classes of the home.
    """
    is_local = not master or master.startswith("local")
    if not is_local or "PYSPARK_GATEWAY_PORT" in os.environ:
        return None
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        return None
    installed = Path(found.origin).parent
    try:
        home = _linked_home(installed)
        if os.environ.setdefault("SPARK_HOME", str(home)) != str(home):
            return None
        start_prefork(home)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home directory.
        log.debug("Spark starts from %s: %s", installed, error)
        return None
    return class_archive(home)


def _linked_home(installed: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "headwater" / f"spark-{hashlib.sha256(str(installed).encode()).hexdigest()[:16]}"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in _LINKED:
        link, target = home / name, installed / name
        if target.exists() and not link.exists():
            link.unlink(missing_ok=True)
            try:
                link.symlink_to(target)
            except FileExistsError:
                continue  # Another process was faster.
    return home


def start_prefork(home: Path, preloaded: Sequence[str] = PRELOADED) -> None:
    """Start the process, and make its program the Python of a Spark that this process starts.

    Do nothing if PYSPARK_PYTHON is another Python, or the system has no process descriptors (only Linux has them). The
    process ends with this one.
    """
    program = str(home / _PROGRAM)
    if os.environ.get("PYSPARK_PYTHON", sys.executable) not in (sys.executable, program):
        return
    if not SYSTEM.has_process_descriptors:
        return
    _write_program(home)
    os.environ["PYSPARK_PYTHON"] = program
    if os.environ.get("PYSPARK_DRIVER_PYTHON") == sys.executable:
        os.environ["PYSPARK_DRIVER_PYTHON"] = program  # If it is set, Spark plans and commits with it.
    if any(process.poll() is None for process in _started):
        return
    place = Path(tempfile.mkdtemp(prefix="headwater-prefork-")) / "socket"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(place))
    listener.listen(64)
    # The same seed that Spark gives its processes: strings have equal hashes in all of them.
    environment = os.environ | {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"), "OPENBLAS_NUM_THREADS": "1"}
    with listener:
        # The pipe is never written to: the process ends when its other end is closed, however this process ends.
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "headwater.spark.prefork", str(listener.fileno()), str(place), *preloaded],
            stdin=subprocess.PIPE,
            env=environment,
            pass_fds=(listener.fileno(),),
        )
    _started.append(process)
    os.environ[SOCKET_VARIABLE] = str(place)


_started: Final[list[subprocess.Popen[bytes]]] = []
"""Keeps the pipes open."""


def _write_program(home: Path) -> None:
    """Write the program that Spark starts as Python: our small program with this interpreter."""
    program = home / _PROGRAM
    small = Path(__file__).with_name("forked_python.py")
    text = f'#!/bin/sh\nexec "{sys.executable}" -E -S "{small}" "{sys.executable}" "$@"\n'
    if not program.exists() or program.read_text() != text:
        draft = home / f"{_PROGRAM}.{os.getpid()}"
        draft.write_text(text)
        draft.chmod(stat.S_IRWXU)
        draft.replace(program)
