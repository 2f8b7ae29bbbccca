"""`headwater serve`: load the settings, configure logging and run the HTTP server."""

from __future__ import annotations

import errno
import socket
import ssl
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.options import ConfigFile, Profile, require_otel, settings_from
from headwater.config import Settings


class ServerMode(StrEnum):
    """Storage modes of the server."""

    MEMORY = "memory"
    FILE_FAST = "file-fast"
    FILE_DURABLE = "file-durable"
    ACID = "acid"
    CLUSTER = "cluster"


def serve(
    profile: Profile = None,
    config_file: ConfigFile = None,
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="ADDRESS", help="Address to listen on.", show_default=False),
    ] = None,
    port: Annotated[
        str | None,
        typer.Option("--port", metavar="PORT", help="Port to listen on; 0 picks a free one.", show_default=False),
    ] = None,
    mode: Annotated[
        ServerMode | None,
        typer.Option("--mode", help="Storage mode; memory stores nothing on disk.", show_default=False),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            metavar="DIR",
            help="Data directory. Selects file-durable if no mode is set.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers", metavar="N", help="Number of server processes; auto runs one per core.", show_default=False
        ),
    ] = None,
    accept_data_loss: Annotated[
        bool,
        typer.Option(
            "--accept-data-loss",
            help="With storage.cold: restore from the object store, because the data directory is lost.",
        ),
    ] = False,
) -> None:
    """Run the server until SIGTERM or Ctrl-C."""
    flags = {
        "server.host": host,
        "server.port": port,
        "storage.mode": mode,
        "storage.data_dir": data_dir,
        "server.workers": workers,
        "storage.accept_data_loss": accept_data_loss or None,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    settings = settings_from(profile, config_file, given).settings
    if data_dir is not None and settings.storage.mode == "memory":
        if mode is not None:
            raise CommandError(
                "--data-dir has no effect with --mode memory, which stores nothing on disk; leave it out, or use"
                " another mode",
                USAGE,
            )
        settings = settings_from(profile, config_file, {**given, "storage.mode": "file-durable"}).settings
    _check_tls_files(settings)
    require_otel(settings)

    from headwater.cluster.start import start_server
    from headwater.cluster.supervisor import WorkerFailedError
    from headwater.http.tls import tls_files_error
    from headwater.storage.interface import StorageError
    from headwater.telemetry import set_up_logging

    set_up_logging(settings.log.filter, settings.log.format)
    try:
        start_server(settings, lambda: settings_from(profile, config_file, given).settings)
    except WorkerFailedError as error:
        raise CommandError(f"{error.kind}: {error}") from None
    except StorageError as error:
        raise CommandError(f"storage: {error}") from None
    except ssl.SSLError as error:
        raise CommandError(tls_files_error(error)) from None
    except OSError as error:
        message = _listen_error(error, settings)
        if message is None:
            raise
        raise CommandError(message) from None


def _check_tls_files(settings: Settings) -> None:
    tls, cluster = settings.tls, settings.cluster
    files = (
        ("tls.cert_path", tls.cert_path),
        ("tls.key_path", tls.key_path),
        ("tls.client_ca_path", tls.client_ca_path),
        ("cluster.tls_cert_path", cluster.tls_cert_path),
        ("cluster.tls_key_path", cluster.tls_key_path),
        ("cluster.tls_ca_path", cluster.tls_ca_path),
    )
    for key, path in files:
        if path is None:
            continue
        try:
            path.open("rb").close()
        except OSError as error:
            raise CommandError(f"{key}: cannot read {path}: {error.strerror}", USAGE) from None


def _listen_error(error: OSError, settings: Settings) -> str | None:
    """Explain why the server cannot listen; None if the error has another cause."""
    host, port = settings.server.host, settings.server.port
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return "too many open files; raise the limit of this process (ulimit -n)"
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use; stop the process that listens there, or choose another port with"
            " --port (0 picks a free one)"
        )
    if error.errno == errno.EACCES and port and port < 1024:
        return f"port {port} requires privileges that this user does not have; choose port 1024 or higher with --port"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"server.host: {host} is not an address of this machine; use 127.0.0.1, or 0.0.0.0 for all interfaces"
    return None
