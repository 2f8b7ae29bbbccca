"""Runs a vitest file with the npm packages pinned in tests/npm and gives back what every single test did.

Invariant: a run that could not start, or that broke before its tests were collected, is an AssertionError. It
says what is missing and how to get it; there is never an empty list of results.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.serving import Server

TESTS = Path(__file__).resolve().parent
NPM = TESTS / "npm"

_HOW_TO_INSTALL = (
    "Run `make test`, which installs everything, or by hand: `cd tests/npm && npm ci --ignore-scripts` "
    "(needs Node.js 20.19 or newer; on Debian: apt-get install nodejs npm)."
)


@dataclass(frozen=True, slots=True)
class Case:
    """One test of a vitest file; its group is the outermost `describe`."""

    group: str
    name: str
    status: str
    failure: str
    duration_ms: float


def node() -> str:
    """The Node.js executable, or an AssertionError that says how to get it."""
    found = shutil.which("node")
    assert found is not None, f"Node.js is missing. {_HOW_TO_INSTALL}"
    return found


def require_npm_packages() -> None:
    locked: dict[str, object] = json.loads((NPM / "package.json").read_text())["dependencies"]
    for name, version in locked.items():
        manifest = NPM / "node_modules" / name / "package.json"
        assert manifest.exists(), f"The npm package {name} is not installed. {_HOW_TO_INSTALL}"
        installed = json.loads(manifest.read_text())["version"]
        assert installed == version, f"{name} is {installed}, but {version} is pinned. {_HOW_TO_INSTALL}"


def check_vitest(file: Path, expected: int, server: Server, *, env: dict[str, str], timeout_secs: float) -> None:
    """Every test of the file passes, there are as many as expected, and the server logged no exception.

    The number is part of it so that a file that stops half-way fails.
    """
    cases = run_vitest(file, env=env, timeout_secs=timeout_secs)
    assert not [case for case in cases if case.status != "passed"], describe_failures(cases)
    assert len(cases) == expected
    assert "Traceback" not in server.log()


def run_vitest(file: Path, *, env: dict[str, str], name_pattern: str | None = None, timeout_secs: float) -> list[Case]:
    """Run one file; `name_pattern` selects tests by full name, the others are reported as skipped."""
    executable = node()
    require_npm_packages()
    with tempfile.TemporaryDirectory(prefix="headwater-vitest-") as directory:
        report = Path(directory) / "report.json"
        # With a higher priority where that is allowed: the official suite has times to live of two seconds.
        command = [
            *("nice", "-n", "-10", executable),
            str(NPM / "node_modules" / "vitest" / "vitest.mjs"),
            "run",
            str(file.relative_to(TESTS)),
            "--config",
            str(NPM / "vitest.config.mjs"),
            "--reporter=json",
            f"--outputFile={report}",
        ]
        if name_pattern is not None:
            command += ["--testNamePattern", name_pattern]
        done = subprocess.run(
            command,
            cwd=TESTS,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_secs,
        )
        output = done.stdout.decode("utf-8", "replace")
        assert report.exists(), f"vitest wrote no report (exit code {done.returncode}):\n{output}"
        results = json.loads(report.read_text())["testResults"]
    broken = [result["message"] for result in results if not result["assertionResults"]]
    assert results, f"vitest found no test file {file}:\n{output}"
    assert not broken, f"vitest could not collect {file}:\n{broken}\n{output}"
    return [_case(test) for result in results for test in result["assertionResults"]]


def _case(test: dict[str, object]) -> Case:
    ancestors = test["ancestorTitles"]
    failures = test["failureMessages"]
    assert isinstance(ancestors, list)
    assert isinstance(failures, list)
    duration = test.get("duration")
    return Case(
        group=ancestors[0] if ancestors else "",
        name=str(test["fullName"]),
        status=str(test["status"]),
        failure=failures[0] if failures else "",
        duration_ms=float(duration) if isinstance(duration, (int, float)) else 0.0,
    )


def describe_failures(cases: list[Case]) -> str:
    failed = [case for case in cases if case.status == "failed"]
    return "\n\n".join(f"{case.name}\n{case.failure}" for case in failed)
