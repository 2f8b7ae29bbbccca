"""The real npm clients in a Node.js process, driven from a test.

Invariant: a command that fails there raises an error here, and waiting ends when the reader has the rows of a query.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import queue
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.shapes.serving import Shapes
from tests.vitest_run import node, require_npm_packages

TIMEOUT_S = 90.0
ITEM = ("id", "title", "n")


class Readers:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._answers[answer["number"]].put(answer)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(30)
        self._thread.join(30)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def tell(self, do: str, **arguments: Any) -> queue.SimpleQueue[dict[str, Any]]:
        number = next(self._numbers)
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answers[number] = answers
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"number": number, "do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        return answers

    def ask(self, do: str, *, timeout_s: float = TIMEOUT_S, **arguments: Any) -> Any:
        try:
            answer = self.tell(do, **arguments).get(timeout=timeout_s)
        except queue.Empty:
            shown = {key: value for key, value in arguments.items() if key != "ids"}
            errors = self.ask("errors", timeout_s=5.0) if do != "errors" else []
            raise AssertionError(f"{do} {shown} did not end within {timeout_s} s; errors: {errors}") from None
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def open(self, name: str, url: str, params: dict[str, Any], columns: Sequence[str] = ITEM, **more: Any) -> None:
        self.ask("open", id=name, url=url, params=params, columns=columns, **more)

    def wait(self, names: Sequence[str], rows: Sequence[Sequence[Any]], timeout_s: float = TIMEOUT_S) -> None:
        """Wait until all of these readers have exactly these rows."""
        ordered = sorted((list(row) for row in rows), key=lambda row: row[0])
        text = json.dumps(ordered, separators=(",", ":"), ensure_ascii=False)
        wanted = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.ask("wait", ids=list(names), digest=wanted, timeout_s=timeout_s)

    def wait_for_sql(self, running: Shapes, name: str, query: str, timeout_s: float = TIMEOUT_S) -> None:
        self.wait([name], running.sql(query), timeout_s)


@contextmanager
def npm_readers() -> Iterator[Readers]:
    require_npm_packages()
    process = subprocess.Popen(
        [node(), str(Path(__file__).with_name("reader.mjs"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    readers = Readers(process)
    try:
        yield readers
    finally:
        readers.end()
