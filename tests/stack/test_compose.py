"""The Docker files define the same services as `headwater up`, as far as a test without Docker can check."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from headwater.config import Settings
from headwater.http.origins import Hosts
from headwater.stack.envoy import find_envoy, validate
from tests.docs.markdown import REPOSITORY
from tests.serving import server_environment

COMPOSE = REPOSITORY / "docker-compose.yml"
DOCKERFILE = REPOSITORY / "Dockerfile"


_VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?:(:?[-?])([^}]*))?\}|\$(\w+)")


def interpolated(value: Any, environ: dict[str, str]) -> Any:
    """The file as Compose sees it: variables are substituted everywhere before profiles select services."""
    if isinstance(value, dict):
        return {key: interpolated(below, environ) for key, below in value.items()}
    if isinstance(value, list):
        return [interpolated(below, environ) for below in value]
    if not isinstance(value, str):
        return value

    def filled(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        name, operator, rest = found[1] or found[4], found[2] or "", found[3] or ""
        given = environ.get(name)
        if given is None or (operator.startswith(":") and not given):
            assert "?" not in operator, f"required variable {name} is missing a value: {rest}"
            return rest
        return given

    return _VARIABLE.sub(filled, value)


def compose_file(**environ: str) -> dict[str, Any]:
    loaded: dict[str, Any] = interpolated(yaml.safe_load(COMPOSE.read_text(encoding="utf-8")), environ)
    return loaded


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = compose_file()["services"]
    return found


def test_no_profile_needs_a_variable_to_be_set() -> None:
    with pytest.raises(AssertionError, match="ELECTRIC_SECRET is missing"):
        interpolated("a: ${ELECTRIC_SECRET:?set it}", {})
    assert interpolated("${A:-x} ${A-x} $$A ${B:-x} ${B-x}", {"B": ""}) == "x x $A x "
    assert "${" not in json.dumps(compose_file())


def of_profile(services: dict[str, Any], *profiles: str) -> set[str]:
    return {
        name for name, body in services.items() if not body.get("profiles") or set(body["profiles"]) & set(profiles)
    }


def test_profiles_have_the_services_of_the_reference(services: dict[str, Any]) -> None:
    default = {"envoy-config", "server", "envoy"}
    assert of_profile(services) == default
    assert of_profile(services, "sync") == default | {"postgres", "sync", "shapes"}
    assert of_profile(services, "dev") == default | {"postgres", "sync", "shapes", "adminer", "heartbeat"}
    assert of_profile(services, "electric") == default | {"postgres", "electric"}


def test_services_have_the_names_of_headwater_up(services: dict[str, Any]) -> None:
    parts = {"server", "envoy", "postgres", "shapes", "sync", "adminer", "heartbeat"}
    assert set(services) - {"envoy-config", "electric"} == parts


def test_registry_is_enabled_in_the_dev_profile(services: dict[str, Any]) -> None:
    assert services["server"]["environment"]["DS_REGISTRY__ENABLED"] == "true"


def test_host_ports_are_those_of_the_settings(services: dict[str, Any]) -> None:
    published = {}
    for name, body in services.items():
        for entry in body.get("ports", ()):
            *address, host, _ = entry.split(":")
            published[(name, int(host))] = address
    settings = Settings()
    assert set(published) == {
        ("server", settings.server.port),
        ("envoy", settings.proxy.port),
        ("postgres", settings.stack.postgres_port),
        ("adminer", settings.stack.adminer_port),
        ("shapes", settings.shapes.port),
    }
    # Only ports that require a token are open to the network.
    assert [key for key, address in published.items() if address != ["127.0.0.1"]] == [("envoy", settings.proxy.port)]


def test_ports_without_a_token_accept_only_loopback_names(services: dict[str, Any]) -> None:
    """A page of a foreign name that resolves to 127.0.0.1 must use the published port, which is the server's own."""
    for name in ("server", "shapes"):
        [published] = services[name]["ports"]
        _, host_port, port = published.split(":")
        assert host_port == port
        names = tuple(services[name]["environment"]["DS_SERVER__ALLOWED_HOSTS"].split(","))
        hosts = Hosts(names, listens_on_loopback=False, port=int(port))
        assert not hosts.allows(f"evil.example:{port}".encode())
        assert hosts.allows(f"localhost:{port}".encode())
        assert hosts.allows(f"{name}:{port}".encode()), "other services use the name of the service"
        assert hosts.allows(b"streams.example.com:8080"), "Envoy passes it on"
    assert services["server"]["environment"]["DS_HTTP__CORS_ORIGINS"] == ""


def test_versions_and_secrets_are_as_required(services: dict[str, Any]) -> None:
    assert services["postgres"]["image"] == "postgres:17-alpine"
    assert services["electric"]["image"] == "electricsql/electric:1.4.2"
    assert re.fullmatch(r"envoyproxy/envoy:v1\.\d+\.\d+", services["envoy"]["image"])
    assert "wal_level=logical" in services["postgres"]["command"]


def test_electric_and_the_sync_share_a_secret_per_installation(services: dict[str, Any], tmp_path: Path) -> None:
    """No variable must be set, each installation has its own secret, and Electric never starts without one."""
    electric, sync, config = services["electric"], services["sync"], services["envoy-config"]
    assert "ELECTRIC_INSECURE" not in COMPOSE.read_text(encoding="utf-8")
    assert "ELECTRIC_SECRET" not in electric["environment"]
    kept = config["command"][config["command"].index("--write-electric-secret") + 1]
    assert kept == sync["environment"]["ELECTRIC_SECRET_FILE"]
    assert sync["environment"]["ELECTRIC_URL"] == "http://electric:3000"
    assert sync["environment"]["DS_PIPELINE__CDC"] == "slot"
    assert electric["depends_on"]["envoy-config"]["condition"] == "service_completed_successfully"
    for body in (electric, sync, config):
        assert any(volume.startswith("stack:/stack") for volume in body["volumes"])
    # Run the shell command from Compose, with another program in place of Electric.
    shell, flag, line = electric["entrypoint"]
    secret = tmp_path / "electric-secret"
    line = line.replace("/app/bin/entrypoint start", "printenv ELECTRIC_SECRET").replace(kept, str(secret))

    def install(directory: Path, **environ: str) -> str:
        directory.mkdir(exist_ok=True)
        command = [argument.replace("/stack", str(directory)) for argument in config["command"][1:]]
        environment = {**config["environment"], **environ, "DS_STACK__DATA_DIR": str(directory)}
        done = subprocess.run(
            [sys.executable, "-m", "headwater", *command],
            cwd=directory,
            env=server_environment(**environment),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return (directory / "electric-secret").read_text(encoding="utf-8")

    first, again = install(tmp_path), install(tmp_path)
    assert first == again, "a second start keeps it"
    assert len(first) >= 32
    assert install(tmp_path / "other") != first
    started = subprocess.run([shell, flag, line], capture_output=True, text=True, timeout=60)
    assert started.stdout.strip() == first
    assert install(tmp_path, ELECTRIC_SECRET="chosen") == "chosen"


def test_every_reference_in_the_compose_file_is_defined(services: dict[str, Any]) -> None:
    volumes = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["volumes"]
    for body in services.values():
        for needed in body.get("depends_on", ()):
            assert needed in services
            profiles = services[needed].get("profiles")
            assert not profiles or set(body["profiles"]) <= set(profiles), (
                "a service would depend on one that is not in its profile"
            )
        for volume in body.get("volumes", ()):
            assert volume.split(":")[0] in volumes
        for url in re.findall(r"(?:@|//)([a-z-]+):\d+", json.dumps(body)):
            assert url in services


def test_commands_of_containers_exist(services: dict[str, Any]) -> None:
    for name in ("envoy-config", "shapes", "sync", "heartbeat"):
        program, *arguments = services[name]["command"]
        if program == "headwater":
            done = subprocess.run(
                [sys.executable, "-m", "headwater", arguments[0], "--help"],
                env=server_environment(COLUMNS="300"),
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr
            for option in (argument for argument in arguments if argument.startswith("--")):
                assert option in done.stdout
        else:
            assert (REPOSITORY / "src" / f"{arguments[1].replace('.', '/')}.py").is_file()


def test_service_envoy_config_writes_a_valid_configuration(services: dict[str, Any], tmp_path: Path) -> None:
    command = [argument.replace("/stack", str(tmp_path)) for argument in services["envoy-config"]["command"][1:]]
    environment = services["envoy-config"]["environment"]
    done = subprocess.run(
        [sys.executable, "-m", "headwater", *command],
        cwd=tmp_path,
        env=server_environment(**environment, DS_STACK__DATA_DIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    config = tmp_path / "envoy.json"
    validate(find_envoy(Settings()), config)
    written = config.read_text()
    # A host name is resolved, and only public keys are included.
    assert "STRICT_DNS" in written
    assert "inline_string" in written
    assert "admin" not in json.loads(written), "the admin interface can stop Envoy and requires no token"
    assert "PRIVATE" not in written
    assert '\\"d\\"' not in written


def test_image_is_built_in_stages_and_runs_unprivileged() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    stages = re.findall(r"(?m)^FROM (\S+)", text)
    assert len(stages) == 2
    assert "COPY --from=build" in text
    last = text.rpartition("FROM ")[2]
    assert re.search(r"(?m)^USER headwater$", last)
    assert "pip install" not in last
    for source in re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", text):
        for path in source.split():
            assert (REPOSITORY / path).exists(), path
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for source in re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", text):
        for path in source.split():
            assert f"!{path.rstrip('/')}" in ignored, f"{path} is not sent to the builder"
    # Every variable in it is a setting.
    from headwater.config import load_settings

    variables = dict(re.findall(r"(DS_\w+)=(\S+)", text))
    assert load_settings(None, None, variables, Path("/nonexistent")).settings.server.host == "0.0.0.0"
