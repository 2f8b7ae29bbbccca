"""The files in `deploy/`: alert rules and dashboard use metrics that the server has, and each alert has a runbook."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from configparser import ConfigParser, SectionProxy
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from headwater.config.describe import described_settings
from tests.docs.markdown import REPOSITORY
from tests.serving import serve, server_environment

DEPLOY = REPOSITORY / "deploy"
_METRIC = re.compile(r"\b((?:headwater|process)_[a-z_]+)\b")


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def expressions() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana/headwater.json").read_text(encoding="utf-8"))
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [*(rule["expr"] for rule in rules()), *targets]


@pytest.fixture(scope="module")
def served() -> set[str]:
    with serve() as server:
        httpx.put(f"{server.url}/v1/stream/a").raise_for_status()
        text = httpx.get(f"{server.url}/metrics").text
    return set(re.findall(r"^(\w+)(?=[ {])", text, re.MULTILINE))


def test_every_metric_of_the_alerts_and_the_dashboard_exists(served: set[str]) -> None:
    used = {name for expression in expressions() for name in _METRIC.findall(expression)}
    assert len(used) > 20
    # A counter or a gauge with labels has no sample before its first event.
    without_samples = {"headwater_subscriptions", "headwater_webhook_calls_total"}
    assert used - served - without_samples == set()


def test_counters_of_errors_exist_before_the_first_error() -> None:
    """Prometheus sees no increase in a series that begins above 0, so an alert would miss the first errors."""
    with serve() as server:
        text = httpx.get(f"{server.url}/metrics").text
    for status in (500, 503, 507):
        assert f'headwater_requests_total{{operation="append",status="{status}"}} 0.0' in text.splitlines()


def test_every_alert_has_a_runbook() -> None:
    page = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^### (Headwater\w+)$", page, re.MULTILINE))
    assert {rule["alert"] for rule in rules()} == documented
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"


def service_of(name: str) -> SectionProxy:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / name)
    return unit["Service"]


def test_the_unit_starts_the_server_and_leaves_it_time_to_drain() -> None:
    service = service_of("headwater.service")
    assert service["ExecStart"].split()[1:3] == ["serve", "--profile"]
    assert int(service["TimeoutStopSec"]) > 30, "the profile prod drains for 30 s"


def variables_of_settings() -> set[str]:
    return {f"DS_{setting.section}__{setting.key}".upper() for setting in described_settings()}


def test_unit_of_a_node_drains_the_supervisor_only_and_leaves_it_time() -> None:
    service = service_of("headwater-node.service")
    given = dict(each.split("=") for each in service["Environment"].split())
    assert given.keys() <= variables_of_settings()
    assert given["DS_STORAGE__MODE"] == "cluster"
    assert service["KillMode"] == "mixed", "the processes of the shards end when theirs is handed over"
    assert int(service["TimeoutStopSec"]) > int(given["DS_SERVER__DRAIN_TIMEOUT_SECS"])


def test_nodes_on_kubernetes_start_drain_and_are_not_restarted_for_postgres() -> None:
    manifest = (DEPLOY / "kubernetes/cluster.yaml").read_text(encoding="utf-8")
    *others, nodes = yaml.safe_load_all(manifest)
    services = {each["metadata"]["name"]: each["spec"] for each in others if each["kind"] == "Service"}
    pod = nodes["spec"]["template"]["spec"]
    [node] = pod["containers"]
    # The image has no entry point.
    assert "ENTRYPOINT" not in (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    assert node["args"][:2] == ["headwater", "serve"]
    serve_help = subprocess.run(
        [sys.executable, "-m", "headwater", "serve", "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert all(option in serve_help for option in node["args"] if option.startswith("--"))
    given = {each["name"]: each.get("value") for each in node["env"]}
    assert given.keys() | set(re.findall(r"\bDS_\w+", manifest)) <= variables_of_settings()
    assert pod["terminationGracePeriodSeconds"] > int(given["DS_SERVER__DRAIN_TIMEOUT_SECS"])
    assert nodes["spec"]["serviceName"] in services
    assert services["headwater-nodes"]["publishNotReadyAddresses"]
    # Without Postgres every node answers 503, and restarting it does not help.
    assert node["readinessProbe"]["httpGet"]["path"] == "/healthz"
    assert "httpGet" not in node["livenessProbe"]


def test_image_of_a_node_has_the_packages_of_a_cluster() -> None:
    """The lock file that the image installs with `EXTRAS=cluster`."""
    locked = (REPOSITORY / "requirements/cluster.txt").read_text(encoding="utf-8")
    for package in ("psycopg", "psycopg-binary", "obstore"):
        assert re.search(rf"^{package}==", locked, re.MULTILINE), package


def test_scheduled_backup_is_restored_and_old_ones_are_deleted(tmp_path: Path) -> None:
    target, data = tmp_path / "backups", tmp_path / "data"
    for name in ("2020-01-01T000000Z", "2021-01-01T000000Z"):
        (target / name).mkdir(parents=True)
    (target / "README").write_text("not a backup")
    script = DEPLOY / "systemd/headwater-backup"
    environment = {**server_environment(), "HEADWATER": str(Path(sys.executable).with_name("headwater")), "KEEP": "2"}
    options = ["--mode", "file-durable", "--data-dir", str(data)]
    with serve(DS_STORAGE__MODE="file-durable", DS_STORAGE__DATA_DIR=str(data)) as server:
        headers = {"Content-Type": "text/plain"}
        httpx.put(f"{server.url}/v1/stream/a", headers=headers, content="kept").raise_for_status()
        done = subprocess.run([script, target, *options], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "all checksums and indexes are correct" in done.stdout
    oldest, newest, other = sorted(path.name for path in target.iterdir())
    assert other == "README", "it is neither deleted nor counted as a backup"
    assert oldest == "2021-01-01T000000Z", "the newest backups are kept, and nothing of the drill remains"
    assert (target / newest / "BACKUP").exists()


def test_failed_drill_keeps_the_old_backups(tmp_path: Path) -> None:
    target = tmp_path / "backups"
    (target / "2020-01-01T000000Z").mkdir(parents=True)
    command = tmp_path / "headwater"
    command.write_text('#!/bin/sh\ncase $1 in backup) mkdir -p "$2";; *) exit 1;; esac\n')
    command.chmod(0o755)
    environment = {**server_environment(), "HEADWATER": str(command), "KEEP": "1"}
    done = subprocess.run([DEPLOY / "systemd/headwater-backup", target], env=environment, timeout=60)
    assert done.returncode != 0
    assert (target / "2020-01-01T000000Z").exists()


def test_backup_unit_runs_the_script_of_the_timer() -> None:
    service = (DEPLOY / "systemd/headwater-backup.service").read_text(encoding="utf-8")
    assert "ExecStart=/opt/headwater/bin/headwater-backup /var/backups/headwater" in service
    assert "OnCalendar=" in (DEPLOY / "systemd/headwater-backup.timer").read_text(encoding="utf-8")
