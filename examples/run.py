"""Run an example: start its processes on this machine, print the address of its page, and stop them on Ctrl-C.

    make example-chat                        or: python examples/run.py chat [--port 8437] [--data DIRECTORY]

Each example has a Headwater server and one or two processes beside it. A process that ends is started again at the same
address, so you can kill any of them (their ids are printed) and watch the page continue. The data stays in
`data/examples`; delete the directory to start from scratch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from headwater.operating_system import die_with_parent

EXAMPLES = Path(__file__).resolve().parent
DATA = EXAMPLES.parent / "data" / "examples"
START_TIMEOUT_S = 60.0
RESTART_PAUSE_S = 0.5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Part:
    """One process of an example. It listens on `port` of the loopback address; 0 if it does not listen."""

    name: str
    command: list[str]
    port: int = 0


@dataclass(frozen=True, slots=True)
class Addresses:
    """What every part of an example needs to know."""

    server: str
    page_port: int
    assets: Path
    """The scripts that were bundled for its page."""


class Stopped(Exception):
    """The user wants the example to end."""


def chat_parts(to: Addresses) -> list[Part]:
    bundle("chat/page.jsx", to.assets / "page.js")
    command = [sys.executable, str(EXAMPLES / "chat" / "app.py"), "--port", str(to.page_port)]
    return [Part("application", [*command, "--streams", to.server, "--assets", str(to.assets)], to.page_port)]


def agents_parts(to: Addresses) -> list[Part]:
    base = [sys.executable, str(EXAMPLES / "agents" / "agents.py"), "--url", to.server.removesuffix("/v1/stream")]
    page = Part("page", [*base, "--part", "page", "--port", str(to.page_port)], to.page_port)
    return [page, *(Part(name, [*base, "--part", name]) for name in ("planner", "researcher", "writer"))]


def editor_parts(to: Addresses) -> list[Part]:
    bundle("editor/page.js", to.assets / "page.js")
    streams = to.server.removesuffix("/v1/stream")
    command = [node(), str(EXAMPLES / "editor" / "server.mjs"), str(to.page_port), streams, str(to.assets)]
    return [Part("documents", command, to.page_port)]


def mcp_parts(to: Addresses) -> list[Part]:
    streams = to.server.removesuffix("/v1/stream")
    command = [sys.executable, str(EXAMPLES / "mcp" / "server.py"), "--port", str(to.page_port), "--streams", streams]
    return [Part("books", command, to.page_port)]


@dataclass(frozen=True, slots=True)
class Example:
    """The port of an example's page, the parts beside the server, and settings of the server."""

    port: int
    parts: Callable[[Addresses], list[Part]]
    settings: dict[str, str] = field(default_factory=dict)
    ask: str = "open http://localhost:{port}"
    """What the user does once it runs."""


RUNS = {
    "agents": Example(8438, agents_parts),
    "chat": Example(8437, chat_parts),
    # examples/editor/server.mjs ends live reads that are silent for longer than this.
    "editor": Example(8440, editor_parts, {"DS_SERVER__SSE_RECONNECT_INTERVAL_SECS": "5"}),
    "mcp": Example(
        8439, mcp_parts, ask=f"run {sys.executable} {EXAMPLES / 'mcp' / 'client.py'} http://localhost:{{port}}/mcp/"
    ),
}


def bundle(source: str, target: Path) -> None:
    """Bundle a page's script with the npm packages that it imports."""
    esbuild = EXAMPLES / "node_modules" / "esbuild" / "bin" / "esbuild"
    if not esbuild.exists():
        raise SystemExit("the npm packages of the examples are missing; run `make example-packages`")
    options = ["--bundle", "--format=esm", "--jsx=automatic", "--minify", "--define:process.env.NODE_ENV='production'"]
    command = [node(), str(esbuild), str(EXAMPLES / source), *options, f"--outfile={target}", "--log-level=warning"]
    subprocess.run(command, check=True, cwd=EXAMPLES, timeout=60)


def node() -> str:
    found = shutil.which("node")
    if found is None:
        raise SystemExit("Node.js is missing; `make example-packages` installs it")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def server_part(port: int, data: Path, settings: dict[str, str]) -> Part:
    command = [sys.executable, "-m", "headwater", "serve", "--mode", "file-durable", "--data-dir", str(data)]
    environment = {"DS_SERVER__HOST": "127.0.0.1", "DS_SERVER__PORT": str(port), **settings}
    return Part("server", ["env", *(f"{name}={value}" for name, value in environment.items()), *command], port)


class Supervisor:
    """Runs parts until it is stopped, and starts those that end again."""

    def __init__(self, log_directory: Path) -> None:
        self._logs = log_directory
        self._stopping = threading.Event()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._watchers: list[threading.Thread] = []

    def start(self, part: Part) -> None:
        self._launch(part)
        self._wait_until_listening(part)
        watcher = threading.Thread(target=self._keep_running, args=(part,), daemon=True)
        watcher.start()
        self._watchers.append(watcher)

    def stop(self) -> None:
        self._stopping.set()
        for watcher in self._watchers:
            watcher.join(RESTART_PAUSE_S * 4)
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()

    def _launch(self, part: Part) -> None:
        # If this program is killed, the kernel ends the parts with it.
        watched = [sys.executable, die_with_parent.__file__, str(os.getpid()), str(int(signal.SIGTERM)), "-1", "-1"]
        with (self._logs / f"{part.name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*watched, *part.command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._processes[part.name] = process
        where = f" on port {part.port}" if part.port else ""
        print(f"  {part.name}: process {process.pid}{where}", flush=True)

    def _keep_running(self, part: Part) -> None:
        while not self._stopping.wait(RESTART_PAUSE_S):
            code = self._processes[part.name].poll()
            if code is not None:
                print(f"  {part.name} ended ({code}); starting it again", flush=True)
                self._launch(part)

    def _wait_until_listening(self, part: Part) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while part.port:
            try:
                socket.create_connection(("127.0.0.1", part.port), 1.0).close()
            except OSError:
                if self._processes[part.name].poll() is not None or time.monotonic() > deadline:
                    said = (self._logs / f"{part.name}.log").read_text(encoding="utf-8", errors="replace")
                    raise SystemExit(f"the {part.name} did not start:\n{said[-2000:]}") from None
                time.sleep(0.05)
            else:
                return


def run(name: str, port: int, data: Path) -> None:
    example = RUNS[name]
    port = port or example.port
    if is_taken(port):
        raise SystemExit(f"port {port} is in use; choose another one with PORT=… (make) or --port")
    data.mkdir(parents=True, exist_ok=True)
    server = server_part(free_port(), data / "streams", example.settings)
    addresses = Addresses(f"http://127.0.0.1:{server.port}/v1/stream", port, data / "assets")
    supervisor = Supervisor(data)
    try:
        supervisor.start(server)
        for part in example.parts(addresses):
            supervisor.start(part)
        print(f"{name}: {example.ask.format(port=port)}", flush=True)
        print(f"its streams: http://localhost:{server.port}/ui", flush=True)
        print("Ctrl-C stops it", flush=True)
        while True:
            signal.pause()
    except Stopped:
        print("stopping", flush=True)
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        supervisor.stop()


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False


def on_stop_signal(_number: int, _frame: FrameType | None) -> None:
    raise Stopped


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("example", choices=sorted(RUNS))
    parser.add_argument("--port", type=int, default=0, help="where the page is served")
    parser.add_argument("--data", type=Path, help="the directory of its data (default: data/examples/NAME)")
    arguments = parser.parse_args()
    for number in STOP_SIGNALS:
        signal.signal(number, on_stop_signal)
    run(arguments.example, arguments.port, arguments.data or DATA / arguments.example)


if __name__ == "__main__":
    main()
