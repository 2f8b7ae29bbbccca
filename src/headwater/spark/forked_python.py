"""The Python that Spark starts: have a fork made with the modules imported, or start Python itself.

It is run without `site` and imports little, because Spark starts it several times. See `prefork.py`.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    python, *words = sys.argv[1:]
    place = os.environ.get("HEADWATER_PREFORK_SOCKET", "")
    if place and words[0] == "-m" and words[1].startswith("pyspark"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(place)
        except OSError:
            connection.close()
        else:
            sys.exit(_wait(connection, words[1:]))
    os.execv(python, [python, *words])


def _wait(connection: socket.socket, words: list[str]) -> int:
    """Have the fork made, pass signals to it, and return its exit code."""
    passed_on = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # Until there is a fork to which they can be passed.
    request = json.dumps([words, dict(os.environ), os.getcwd()]).encode()  # noqa: PTH109 - pathlib takes long to import
    message = len(request).to_bytes(4, "big") + request
    sent = socket.send_fds(connection, [message[:4096]], [0, 1, 2])
    connection.sendall(message[sent:])
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nowhere, number)
    pid = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
    if not pid:
        return 1
    for number in passed_on:
        signal.signal(number, lambda received, _: os.kill(pid, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    code = connection.recv(1)
    if not code:
        os.kill(pid, signal.SIGKILL)  # The process that made it was killed.
        return 1
    return code[0]


if __name__ == "__main__":
    main()
