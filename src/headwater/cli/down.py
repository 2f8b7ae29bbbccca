"""`headwater down`: stop the stack of a data directory, and services that a killed supervisor left running."""

from __future__ import annotations

import signal
import time
from typing import Annotated

import typer

from headwater.cli.errors import CommandError
from headwater.cli.options import ConfigFile, settings_from
from headwater.cli.token import StackDirectory as DirectoryOption
from headwater.stack.state import StackDirectory, StackRunningError
from headwater.stack.supervisor import stop_leftovers


def down(
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait.")] = 120.0,
    data_dir: DirectoryOption = None,
    config_file: ConfigFile = None,
) -> None:
    """Stop all services of the stack in reverse order, then the supervisor."""
    settings = settings_from(None, config_file).settings
    directory = StackDirectory(data_dir or settings.stack.data_dir)
    if directory.read() is None and not directory.is_supervised:
        typer.echo(f"no stack has been started in {directory.root}", err=True)
        return
    deadline = time.monotonic() + timeout
    was_running = False
    supervisor = None
    while directory.is_supervised:
        status = directory.read()
        if not was_running and status is not None and status.identity.is_alive:
            supervisor = status.identity
            supervisor.send(signal.SIGTERM)
            was_running = True
        if time.monotonic() > deadline:
            raise CommandError(
                f"the stack in {directory.root} did not stop within {timeout:g} s; see `headwater status`"
            )
        time.sleep(0.05)
    if supervisor is not None:
        # It has released the lock and is about to exit.
        supervisor.wait(max(1.0, deadline - time.monotonic()))
    try:
        directory.acquire()
    except StackRunningError:
        raise CommandError(
            f"another stack has been started in {directory.root} in the meantime; to stop it, run `headwater"
            " down` again"
        ) from None
    left = stop_leftovers(directory, settings.stack.stop_timeout_secs)
    _mark_stopped(directory)
    directory.release()
    also = f"; also stopped services left by a killed supervisor: {', '.join(left)}" if left else ""
    typer.echo(("the stack is stopped" if was_running else "the stack was not running") + also, err=True)


def _mark_stopped(directory: StackDirectory) -> None:
    """Record in the state file that all services are stopped."""
    status = directory.read()
    if status is None:
        return
    status.phase = "stopped"
    for service in status.parts:
        if service.state != "absent":
            service.state, service.pid, service.started, service.detail = "stopped", 0, 0, ""
    directory.write(status)
