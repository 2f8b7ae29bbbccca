"""`headwater.Server` embedded in a program: asyncio's own loop and uvloop, durable data, and a clean shutdown."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from headwater import AsyncStream, Server
from headwater.config import ConfigError
from headwater.testing import running_server
from tests.ports import free_port
from tests.serving import server_environment

Runner = Callable[[Awaitable[None]], None]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_program_serves_and_uses_its_own_streams(run: Runner) -> None:
    async def program() -> None:
        before = signal.getsignal(signal.SIGINT)
        async with Server() as server, AsyncStream(server.stream_url("own")) as stream:
            assert signal.getsignal(signal.SIGINT) is before
            await stream.create()

            async def write() -> None:
                for n in range(20):
                    await stream.append(n)
                await stream.close()

            writing = asyncio.create_task(write())
            assert [message async for message in stream.follow()] == list(range(20))
            await writing

    run(program())


def test_data_survives_in_its_directory(tmp_path: Path) -> None:
    async def write() -> None:
        async with Server(tmp_path / "data") as server, AsyncStream(server.stream_url("kept")) as stream:
            await stream.create()
            await stream.append("kept")

    async def read() -> list[object]:
        async with Server(tmp_path / "data") as server, AsyncStream(server.stream_url("kept")) as stream:
            return [message async for message in stream.read()]

    asyncio.run(write())
    assert asyncio.run(read()) == ["kept"]


def test_an_unknown_setting_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"\(in settings of Server\); did you mean server.long_poll_timeout_secs"):
        Server(settings={"server.long_pol_timeout_secs": 1})


def test_a_server_in_memory_says_nothing_about_command_line_options(caplog: pytest.LogCaptureFixture) -> None:
    with running_server():
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_address_is_free_after_the_server_is_stopped() -> None:
    async def program() -> None:
        port = free_port()
        async with Server(port=port) as first:
            with pytest.raises(OSError, match="in use"):
                await Server(port=port).start()
        async with Server(port=port) as second:
            assert second.url == first.url

    asyncio.run(program())


def test_importing_headwater_loads_neither_client_nor_server() -> None:
    program = (
        "import sys, headwater; heavy = {'asyncio', 'msgspec', 'httptools', 'pydantic', 'headwater.client'};"
        " assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        " headwater.Stream, headwater.StreamNotFoundError;"
        " assert 'asyncio' not in sys.modules and 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=server_environment(), timeout=60)


def test_neither_the_server_nor_the_spark_source_imports_the_client() -> None:
    program = (
        "import importlib, pkgutil, sys, headwater.core, headwater.http.server, headwater.spark.source;"
        " [importlib.import_module(f'headwater.core.{each.name}')"
        " for each in pkgutil.iter_modules(headwater.core.__path__)];"
        " assert not [name for name in sys.modules if name.startswith('headwater.client')], sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=server_environment(), timeout=60)


def test_the_fixtures_of_headwater_testing(tmp_path: Path) -> None:
    """Run a separate test suite, as a user of the package would write it."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["headwater.testing"]\n')
    (tmp_path / "test_own.py").write_text(
        "import httpx\n"
        "from headwater import Stream\n"
        "def test_stream(headwater_stream):\n"
        "    headwater_stream.append({'n': 1})\n"
        "    assert headwater_stream.last() == [{'n': 1}]\n"
        "def test_another_stream_is_empty(headwater_stream):\n"
        "    assert list(headwater_stream.read()) == []\n"
        "def test_server(headwater_server):\n"
        "    assert httpx.get(headwater_server.url + '/healthz').status_code in {200, 204, 404}\n"
        "    with Stream(headwater_server.stream_url('a')) as stream:\n"
        "        assert stream.create().created\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", str(tmp_path)],
        cwd=tmp_path,
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
