"""Start Spark's Python processes by forking one process that has already imported their modules.

Spark starts about ten Python processes before the first row of a query flows (to find the data source, to plan, to
read, to write, to commit), and each imports PySpark, pyarrow and this package again: about a second of CPU time. Here
one process imports them while the JVM starts. What Spark starts as its Python is a small program (`forked_python.py`),
which passes its descriptors, arguments and environment to that process and waits for the fork to end.

Invariant: a fork ends when Spark ends its program, and the program ends when the fork does. The parent has one Python
thread and has opened no connection, so a fork has no lock or socket of another one.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from headwater.operating_system import SYSTEM

_REQUEST_MAX: Final = 4 * 1024 * 1024


class Prefork:
    """The loop of the process: a fork for each request, and the exit code to its program when it ends."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._forks: dict[socket.socket, int] = {}
        """By connection: the descriptor that reports the end of its fork."""

    def run(self) -> None:
        """Serve until the standard input is closed and the last fork has ended."""
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "stop")
        self._selector.register(self._listener, selectors.EVENT_READ, "accept")
        is_stopping = False
        while not is_stopping or self._forks:
            for key, _ in self._selector.select():
                match key.data:
                    case "stop":
                        is_stopping = True
                        self._selector.unregister(sys.stdin.fileno())
                        self._selector.unregister(self._listener)
                        self._listener.close()
                    case "accept":
                        self._accept()
                    case ("ended", connection, pid):
                        self._ended(connection, pid)
                    case ("left", connection, pid):
                        # Its program was killed: the fork must not outlive it.
                        if connection in self._forks:
                            self._selector.unregister(connection)
                            os.kill(pid, signal.SIGTERM)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        request = _receive(connection)
        if request is None:
            connection.close()
            return
        words, environment, directory, descriptors = request
        pid = os.fork()
        if pid == 0:
            # The fork says its process id itself: its program must be able to end it if this process is killed now.
            with suppress(OSError):
                connection.sendall(os.getpid().to_bytes(4, "big"))
            connection.close()
            self._become(words, environment, directory, descriptors)
        for number in descriptors:
            os.close(number)
        self._forks[connection] = descriptor = SYSTEM.process_descriptor(pid)
        self._selector.register(connection, selectors.EVENT_READ, ("left", connection, pid))
        self._selector.register(descriptor, selectors.EVENT_READ, ("ended", connection, pid))

    def _ended(self, connection: socket.socket, pid: int) -> None:
        descriptor = self._forks.pop(connection)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        with suppress(OSError):
            connection.sendall(bytes([os.waitstatus_to_exitcode(status) & 0xFF]))
        connection.close()

    def _become(self, words: list[str], environment: dict[str, str], directory: str, given: list[int]) -> NoReturn:
        """Run a module of Spark in this fork; its name is the first word."""
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._selector.close()
            self._listener.close()
            for connection, descriptor in self._forks.items():
                connection.close()
                os.close(descriptor)
            for number, target in zip(given, (0, 1, 2), strict=True):
                os.dup2(number, target)
                os.close(number)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(directory)
            paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
            sys.path[:] = list(dict.fromkeys([directory, *paths, *sys.path]))
            sys.argv = list(words)
            sys.modules.pop(words[0], None)  # It runs as the main module.
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)


def _receive(connection: socket.socket) -> tuple[list[str], dict[str, str], str, list[int]] | None:
    """The arguments, environment, directory and descriptors of a request."""
    content, descriptors, _, _ = socket.recv_fds(connection, 65536, 3)
    size = int.from_bytes(content[:4], "big")
    while 4 <= len(content) < size + 4 <= _REQUEST_MAX:
        more = connection.recv(65536)
        if not more:
            break
        content += more
    if len(descriptors) != 3 or len(content) != size + 4:
        for number in descriptors:
            os.close(number)
        return None
    words, environment, directory = json.loads(content[4:])
    return words, environment, directory, descriptors


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    place = Path(sys.argv[2])
    # A signal to all processes of a service is for the driver: this process ends after it, and removes its socket.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        for name in sys.argv[3:]:
            with suppress(ImportError):
                importlib.import_module(name)
        gc.collect()
        gc.freeze()
        Prefork(listener).run()
    finally:
        place.unlink(missing_ok=True)
        with suppress(OSError):
            place.parent.rmdir()


if __name__ == "__main__":
    main()
