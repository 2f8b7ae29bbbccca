"""A real S3-compatible object store: SeaweedFS, started on free ports of this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import obstore
from obstore import exceptions
from obstore.store import S3Store

from tests.ports import free_port
from tests.waiting import wait_until

BUCKET = "headwater"
_KEY, _SECRET = "test-key", "test-secret"
_PORTS = ("master", "master-grpc", "volume", "volume-grpc", "filer", "filer-grpc", "s3", "s3-grpc")


class SeaweedFs:
    """One process with a master, a volume server, a filer and the S3 gateway. It can be stopped and started again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = {name: free_port() for name in _PORTS}
        self._config = directory / "s3.json"
        credentials = [{"accessKey": _KEY, "secretKey": _SECRET}]
        identity = {"name": "test", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
        self._config.write_text(json.dumps({"identities": [identity]}))
        self.endpoint = f"http://127.0.0.1:{self._ports['s3']}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_REGION": "us-east-1",
        }

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"

    def start(self) -> None:
        ports = self._ports
        command = [
            str(Path(sysconfig.get_path("scripts")) / "weed"),
            "-logtostderr=true",
            "server",
            f"-dir={self._directory}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-master.port={ports['master']}",
            f"-master.port.grpc={ports['master-grpc']}",
            "-master.volumeSizeLimitMB=1024",
            "-master.telemetry=false",
            f"-volume.port={ports['volume']}",
            f"-volume.port.grpc={ports['volume-grpc']}",
            "-volume.max=20",
            "-filer",
            f"-filer.port={ports['filer']}",
            f"-filer.port.grpc={ports['filer-grpc']}",
            "-s3",
            f"-s3.port={ports['s3']}",
            f"-s3.port.grpc={ports['s3-grpc']}",
            # Further services on fixed ports, which two stores on one machine cannot share.
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={self._config}",
        ]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self._is_ready, what="SeaweedFS takes writes", every_s=0.1)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(timeout=60)

    def open(self) -> S3Store:
        """The bucket, without retries."""
        return S3Store(
            BUCKET,
            endpoint=self.environment["AWS_ENDPOINT_URL"],
            access_key_id=_KEY,
            secret_access_key=_SECRET,
            region="us-east-1",
            client_options={"allow_http": True, "timeout": "10s"},
            retry_config={"max_retries": 0},
        )

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._directory / "log").read_text(errors="replace")[-2000:]
        try:
            obstore.put(self.open(), "ready", b"yes")
        except exceptions.BaseError:
            return False
        return True


@contextmanager
def seaweedfs(directory: Path) -> Iterator[SeaweedFs]:
    store = SeaweedFs(directory)
    store.start()
    try:
        yield store
    finally:
        store.stop()
        shutil.rmtree(directory, ignore_errors=True)
