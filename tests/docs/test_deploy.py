"""The files in `deploy/`: alert rules and dashboard use metrics that the server has, and each alert has a runbook."""

from __future__ import annotations

import json
import re
from configparser import ConfigParser
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from tests.docs.markdown import REPOSITORY
from tests.serving import serve

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


def test_every_alert_has_a_runbook() -> None:
    page = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^### (Headwater\w+)$", page, re.MULTILINE))
    assert {rule["alert"] for rule in rules()} == documented
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"


def test_the_unit_starts_the_server_and_leaves_it_time_to_drain() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd/headwater.service")
    service = unit["Service"]
    assert service["ExecStart"].split()[1:3] == ["serve", "--profile"]
    assert int(service["TimeoutStopSec"]) > 30, "the profile prod drains for 30 s"
