"""`headwater up`: run the stack in the foreground, or with --detach in the background."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.options import ConfigFile, require_otel, settings_from
from headwater.cli.token import StackDirectory as DirectoryOption
from headwater.cli.token import default_claims, key_ring
from headwater.config import LoadedSettings, Settings
from headwater.stack.certificates import trial_certificate
from headwater.stack.display import LineDisplay, TableDisplay
from headwater.stack.envoy import EnvoyEndpoints, EnvoyError, Upstream, envoy_config
from headwater.stack.jwks import JwksServer
from headwater.stack.keys import replace_file
from headwater.stack.profiles import Profile, StackPlan, check_settings, jwks_file_for, services_for
from headwater.stack.server_address import StackSettingsError
from headwater.stack.state import ShardedDirectoryError, StackDirectory, StackRunningError, current_status
from headwater.stack.supervisor import StackStartError, Supervisor, stop_leftovers
from headwater.stack.tokens import ADMIN_SCOPE, mint


def up(
    profile: Annotated[
        Profile,
        typer.Option("--profile", help="default: server and Envoy; sync: also Postgres and the sync; dev: also tools."),
    ] = Profile.DEFAULT,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers", metavar="N", help="Number of server processes; auto runs one per core.", show_default=False
        ),
    ] = None,
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes",
            metavar="N",
            min=0,
            max=16,
            help="A cluster of N nodes with three Postgres servers and an object store, instead of one server.",
            show_default=False,
        ),
    ] = 0,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when all services are up; `headwater down` stops them.")
    ] = False,
    tls: Annotated[
        bool,
        typer.Option(
            "--tls",
            help="Serve HTTPS, with HTTP/2 for browsers. Uses proxy.tls_cert_path, or a self-signed certificate.",
        ),
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print plain lines, even on a terminal.")] = False,
    write_envoy_config: Annotated[
        Path | None,
        typer.Option(
            "--write-envoy-config",
            metavar="FILE",
            help="Only write the configuration for an Envoy that runs elsewhere, and create the keys.",
        ),
    ] = None,
    upstream: Annotated[
        str, typer.Option("--upstream", metavar="HOST:PORT", help="Address of the server for that Envoy.")
    ] = "",
    shapes_upstream: Annotated[
        str,
        typer.Option("--shapes-upstream", metavar="HOST:PORT", help="Address of `headwater shapes` for that Envoy."),
    ] = "",
    write_secret: Annotated[
        Path | None,
        typer.Option(
            "--write-electric-secret",
            metavar="FILE",
            help="With --write-envoy-config: also store a random secret for Electric there, unless one exists.",
        ),
    ] = None,
    data_dir: DirectoryOption = None,
    config_file: ConfigFile = None,
) -> None:
    """Start the server behind Envoy (more with --profile) and supervise it until Ctrl-C or `headwater down`."""
    flags: dict[str, object] = {} if workers is None else {"server.workers": workers}
    loaded = settings_from(None, config_file, flags)
    directory = StackDirectory(data_dir or loaded.settings.stack.data_dir)
    if tls and loaded.settings.proxy.tls_cert_path is None:
        files = trial_certificate(directory.root / "tls")
        flags |= {"proxy.tls_cert_path": files.certificate, "proxy.tls_key_path": files.key}
        loaded = settings_from(None, config_file, flags)
    require_otel(loaded.settings)
    if nodes and profile is not Profile.DEFAULT:
        raise CommandError("--nodes works with --profile default only", USAGE)
    if nodes and workers is not None:
        raise CommandError("--workers does not work with --nodes: a node runs one process per shard", USAGE)
    try:
        check_settings(loaded.settings)
        if write_envoy_config is not None:
            _write_envoy_config(loaded, directory, write_envoy_config, upstream, shapes_upstream)
            if write_secret is not None:
                _write_electric_secret(write_secret)
        elif detach:
            _run_in_background(directory, plain=plain)
            for line in next_steps(loaded.settings, directory, profile):
                typer.echo(line, err=True)
        else:
            _run_in_foreground(loaded, directory, profile, config_file, nodes=nodes, plain=plain)
    except (StackSettingsError, ShardedDirectoryError) as error:
        raise CommandError(str(error), USAGE) from None
    except (StackRunningError, StackStartError, EnvoyError) as error:
        raise CommandError(str(error)) from None


def _run_in_foreground(
    loaded: LoadedSettings,
    directory: StackDirectory,
    profile: Profile,
    config_file: Path | None,
    *,
    nodes: int,
    plain: bool,
) -> None:
    settings = loaded.settings
    directory.acquire()
    try:
        directory.check_is_joined()
        left = stop_leftovers(directory, settings.stack.stop_timeout_secs)
        if left:
            typer.echo(f"stopped services left by a killed supervisor: {', '.join(left)}", err=True)
        own_keys = None if settings.auth.jwks_url else JwksServer(jwks_file_for(settings, directory))
        try:
            plan = StackPlan(
                loaded,
                directory,
                profile,
                own_keys.url if own_keys is not None else settings.auth.jwks_url,
                config_file.absolute() if config_file is not None else None,
                nodes,
            )
            show = _display(plain=plain)
            try:
                supervisor = Supervisor(directory, services_for(plan), settings.stack, profile=profile.value, show=show)
                supervisor.check_ports()
                supervisor.run()
            finally:
                show.close()
        finally:
            if own_keys is not None:
                own_keys.close()
    finally:
        directory.release()


def _display(*, plain: bool) -> LineDisplay | TableDisplay:
    return TableDisplay() if sys.stderr.isatty() and not plain else LineDisplay(sys.stderr)


def _run_in_background(directory: StackDirectory, *, plain: bool) -> None:
    """Start the same command without --detach in a new session, and follow its state file until all services are up."""
    if directory.is_supervised:
        directory.acquire()  # Raises an error that names the other supervisor.
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
            status = current_status(directory)
            if status is not None and status.pid == child.pid:
                show(status)
                if status.phase == "up":
                    return
            if child.poll() is not None:
                output = (
                    directory.supervisor_log.read_bytes()[began_at:].decode("utf-8", "replace").strip().splitlines()
                )
                reasons = [line for line in output if line.startswith("headwater: ")] or output[-1:]
                reason = " ".join(reasons).removeprefix("headwater: ")
                raise CommandError(
                    reason or f"the supervisor exited; see {directory.supervisor_log}", child.returncode or 1
                )
            time.sleep(0.05)
    except KeyboardInterrupt:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)
        child.wait()
        raise
    finally:
        show.close()
        # The supervisor keeps running; do not wait for it.
        child.returncode = child.returncode if child.returncode is not None else 0


def next_steps(settings: Settings, directory: StackDirectory, profile: Profile) -> tuple[str, str]:
    """The address of the stream browser, with a token in the dev profile, and the commands to run next.

    The list of streams and the state of the pipeline have reserved names, which need the scope.
    """
    host = "localhost" if settings.proxy.host in {"127.0.0.1", "0.0.0.0", "::", "::1"} else settings.proxy.host
    scheme = "http" if settings.proxy.tls_cert_path is None else "https"
    address = f"{scheme}://{host}:{settings.proxy.port}/ui/"
    if profile is Profile.DEV and settings.auth.has_own_keys:
        made = mint(key_ring(settings, directory.root), replace(default_claims(settings), scope=ADMIN_SCOPE))
        browser = f"stream browser, with a token valid for one hour: {address}#/?token={made}"
    else:
        browser = (
            f"stream browser: {address} (it asks for a token; `headwater token --scope {ADMIN_SCOPE}` creates one)"
        )
    return browser, "`headwater status` shows the services, `headwater down` stops them"


def _write_electric_secret(file: Path) -> None:
    """Store the secret: the one in ELECTRIC_SECRET, else the existing one, else a random one."""
    given = os.environ.get("ELECTRIC_SECRET", "")
    if not given and file.exists() and file.read_text(encoding="utf-8").strip():
        return
    # Readable for the users that Electric and the sync run as; only their containers mount the volume.
    replace_file(file, (given or secrets.token_urlsafe(32)).encode(), 0o644)


def _write_envoy_config(
    loaded: LoadedSettings, directory: StackDirectory, file: Path, upstream: str, shapes_upstream: str
) -> None:
    server = _upstream(upstream, "--write-envoy-config requires --upstream HOST:PORT, the address of the server")
    shapes = None
    if shapes_upstream:
        shapes = _upstream(shapes_upstream, f"--shapes-upstream {shapes_upstream} is not HOST:PORT")
    directory.make()
    settings = loaded.settings
    jwks = settings.auth.jwks_url or jwks_file_for(settings, directory)
    endpoints = EnvoyEndpoints(server, jwks, shapes=shapes)
    # Readable for the user that Envoy runs as; the file contains no secret.
    replace_file(file, envoy_config(settings, endpoints).encode(), 0o644)


def _upstream(text: str, otherwise: str) -> Upstream:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        raise CommandError(otherwise, USAGE)
    return Upstream(host, int(port))
