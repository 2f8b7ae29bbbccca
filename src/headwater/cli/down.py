"""`headwater down`: end the stack of a data directory, and what a killed supervisor left of one."""

from __future__ import annotations

import signal
import time
from typing import Annotated

import typer

from headwater.cli.errors import CommandError
from headwater.cli.options import ConfigFile, settings_from
from headwater.cli.token import StackDirectory as DirectoryOption
from headwater.stack.state import StackBusy, StackDirectory
from headwater.stack.supervisor import clean_up_after


def down(
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait for it.")] = 120.0,
    data_dir: DirectoryOption = None,
    config_file: ConfigFile = None,
) -> None:
    """Stop the stack: every part in reverse order, then its supervisor."""
    settings = settings_from(None, config_file).settings
    directory = StackDirectory(data_dir or settings.stack.data_dir)
    if directory.read() is None and not directory.is_supervised:
        typer.echo(f"no stack was ever started on {directory.root}", err=True)
        return
    deadline = time.monotonic() + timeout
    told = False
    supervisor = None
    while directory.is_supervised:
        status = directory.read()
        if not told and status is not None and status.identity.is_alive:
            supervisor = status.identity
            supervisor.send(signal.SIGTERM)
            told = True
        if time.monotonic() > deadline:
            raise CommandError(
                f"the stack on {directory.root} did not end within {timeout:g} s; see `headwater status`"
            )
        time.sleep(0.05)
    if supervisor is not None:
        # It has let go of the directory; its last step is to end.
        supervisor.wait(max(1.0, deadline - time.monotonic()))
    try:
        directory.acquire()
    except StackBusy:
        raise CommandError(f"another stack was started on {directory.root} meanwhile") from None
    left = clean_up_after(directory, settings.stack.stop_timeout_secs)
    _tell_the_state(directory)
    directory.release()
    also = f"; also ended what was left behind: {', '.join(left)}" if left else ""
    typer.echo(("the stack is down" if told else "the stack was not running") + also, err=True)


def _tell_the_state(directory: StackDirectory) -> None:
    """Nothing of it runs any more, whatever the state file said."""
    status = directory.read()
    if status is None:
        return
    status.phase = "stopped"
    for part in status.parts:
        if part.state != "absent":
            part.state, part.pid, part.started, part.detail = "stopped", 0, 0, ""
    directory.write(status)
