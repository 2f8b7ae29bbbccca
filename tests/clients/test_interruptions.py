"""The official JavaScript packages in Node while the server is killed and restarted, and while the network is down.

A minute without a network takes one second here, which is several attempts of every client; `--long` waits a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.ai.processes import serving
from tests.client.proxies import CutNetwork, running
from tests.http_handlers import HandlerServer, QuietHandler
from tests.ports import free_port
from tests.serving import Server, serve
from tests.vitest_run import check_vitest

TESTS = Path(__file__).parent / "interruptions.test.mjs"
EXPECTED = 8


class RestartableServer:
    """A server that is killed and restarted with the same data and port."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self.server = self._start(free_port())

    def _start(self, port: int) -> Server:
        running_server = serve(
            directory=self._directory,
            port=port,
            DS_STORAGE__MODE="file-durable",
            DS_SERVER__LONG_POLL_TIMEOUT_SECS="2",
        )
        return self._stack.enter_context(running_server)

    def kill(self) -> None:
        port = self.server.port
        self.server.kill()
        self.server = self._start(port)


@contextmanager
def controlled(**actions: Callable[[], None]) -> Iterator[str]:
    """Serve an address that runs an action for each POST, and returns 204 when it is done."""

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            actions[self.path.removeprefix("/")]()
            self.send_response(204)
            self.end_headers()

    with HandlerServer(Handler).running() as server:
        yield server.url


@pytest.mark.timeout(900)
def test_the_official_packages_lose_nothing_when_interrupted(tmp_path: Path, long: bool) -> None:
    with ExitStack() as stack:
        restartable = RestartableServer(tmp_path, stack)
        network = stack.enter_context(running(CutNetwork(restartable.server.url)))
        streams, read = (f"{url}/v1/stream" for url in (restartable.server.url, network.url))
        app = stack.enter_context(serving(streams, read))
        control = stack.enter_context(controlled(kill=restartable.kill, offline=network.cut, online=network.restore))
        environment = {
            "CONTROL": control,
            "READ": read,
            "STREAMS": streams,
            "APP": app,
            "OFFLINE_MS": "60000" if long else "1000",
        }
        check_vitest(TESTS, EXPECTED, restartable.server, env=environment, timeout_secs=800)
        assert network.cuts > 0, "connections were open when the network was cut"
