"""`headwater up`: the whole stack as one command, in the foreground or, with --detach, behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.options import ConfigFile, settings_from
from headwater.cli.token import StackDirectory as DirectoryOption
from headwater.config import LoadedSettings
from headwater.stack.assembly import Plan, Profile, check_settings, jwks_file_of, parts_of
from headwater.stack.display import Lines, Screen
from headwater.stack.envoy import Door, EnvoyTrouble, Upstream, envoy_config
from headwater.stack.jwks import JwksServer
from headwater.stack.keys import replace_file
from headwater.stack.server_address import UnsafeSettings
from headwater.stack.state import ManifestMismatch, StackBusy, StackDirectory, truth_about
from headwater.stack.supervisor import StackFailed, Supervisor, clean_up_after


def up(
    profile: Annotated[
        Profile,
        typer.Option("--profile", help="default: server and Envoy; sync: and Postgres and the sync; dev: and tools."),
    ] = Profile.DEFAULT,
    shards: Annotated[
        int | None, typer.Option("--shards", min=1, max=64, help="Server processes. Belongs to the data directory.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when all is up; `headwater down` ends it.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines, also on a terminal.")] = False,
    write_envoy_config: Annotated[
        Path | None,
        typer.Option(
            "--write-envoy-config",
            metavar="FILE",
            help="Start nothing: write the configuration of an Envoy that runs elsewhere, and the keys beside it.",
        ),
    ] = None,
    upstream: Annotated[
        str, typer.Option("--upstream", metavar="HOST:PORT", help="Where that Envoy finds the server.")
    ] = "",
    data_dir: DirectoryOption = None,
    config_file: ConfigFile = None,
) -> None:
    """Start the server behind Envoy, and with --profile the rest; supervise it until Ctrl-C or `headwater down`."""
    loaded = settings_from(None, config_file)
    directory = StackDirectory(data_dir or loaded.settings.stack.data_dir)
    try:
        check_settings(loaded.settings)
        if write_envoy_config is not None:
            _write_envoy_config(loaded, directory, write_envoy_config, upstream)
        elif detach:
            _detached(directory, plain=plain)
        else:
            _in_the_foreground(loaded, directory, profile, _shards(loaded, shards), config_file, plain=plain)
    except (UnsafeSettings, ManifestMismatch) as error:
        raise CommandError(str(error), USAGE) from None
    except (StackBusy, StackFailed, EnvoyTrouble) as error:
        raise CommandError(str(error)) from None


def _shards(loaded: LoadedSettings, asked: int | None) -> int | None:
    """What somebody asked for; None leaves it to the directory."""
    if asked is not None or loaded.origins["stack.shards"] == "default":
        return asked
    return loaded.settings.stack.shards


def _in_the_foreground(
    loaded: LoadedSettings,
    directory: StackDirectory,
    profile: Profile,
    asked_shards: int | None,
    config_file: Path | None,
    *,
    plain: bool,
) -> None:
    settings = loaded.settings
    directory.acquire()
    try:
        shards = directory.settle_shards(asked_shards)
        left = clean_up_after(directory, settings.stack.stop_timeout_secs)
        if left:
            typer.echo(f"ended what a killed supervisor left behind: {', '.join(left)}", err=True)
        own_keys = None if settings.auth.jwks_url else JwksServer(jwks_file_of(settings, directory))
        try:
            plan = Plan(
                loaded,
                directory,
                profile,
                shards,
                own_keys.url if own_keys is not None else settings.auth.jwks_url,
                config_file.absolute() if config_file is not None else None,
            )
            show = _display(plain=plain)
            try:
                supervisor = Supervisor(
                    directory, parts_of(plan), settings.stack, profile=profile.value, shards=shards, show=show
                )
                supervisor.check_ports()
                supervisor.run()
            finally:
                show.close()
        finally:
            if own_keys is not None:
                own_keys.close()
    finally:
        directory.release()


def _display(*, plain: bool) -> Lines | Screen:
    return Screen() if sys.stderr.isatty() and not plain else Lines(sys.stderr)


def _detached(directory: StackDirectory, *, plain: bool) -> None:
    """The same command without --detach in a session of its own; its state file tells how it gets on."""
    if directory.is_supervised:
        directory.acquire()  # Says who it is.
    directory.make()
    arguments = [argument for argument in sys.argv[1:] if argument not in {"--detach", "-d"}]
    directory.rotate_log(directory.supervisor_log)
    with directory.supervisor_log.open("ab") as log:
        began_at = log.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "headwater", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    show = _display(plain=plain)
    try:
        while True:
            status = truth_about(directory)
            if status is not None and status.pid == child.pid:
                show(status)
                if status.phase == "up":
                    return
            if child.poll() is not None:
                said = directory.supervisor_log.read_bytes()[began_at:].decode("utf-8", "replace").strip().splitlines()
                reasons = [line for line in said if line.startswith("headwater: ")] or said[-1:]
                reason = " ".join(reasons).removeprefix("headwater: ")
                raise CommandError(
                    reason or f"the supervisor ended; see {directory.supervisor_log}", child.returncode or 1
                )
            time.sleep(0.05)
    except KeyboardInterrupt:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)
        child.wait()
        raise
    finally:
        show.close()
        # It goes on without us; nobody waits for it here.
        child.returncode = child.returncode if child.returncode is not None else 0


def _write_envoy_config(loaded: LoadedSettings, directory: StackDirectory, file: Path, upstream: str) -> None:
    host, colon, port = upstream.rpartition(":")
    if not colon or not port.isdigit():
        raise CommandError("--write-envoy-config needs --upstream HOST:PORT, where Envoy finds the server", USAGE)
    directory.make()
    settings = loaded.settings
    jwks = settings.auth.jwks_url or jwks_file_of(settings, directory)
    door = Door((Upstream(host, int(port)),), jwks)
    # Whoever Envoy runs as there must be able to read it; it holds no secret.
    replace_file(file, envoy_config(settings, door).encode(), 0o644)
