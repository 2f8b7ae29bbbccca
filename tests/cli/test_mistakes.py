"""Every command, called with a common mistake, fails with one message on stderr and without a traceback."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
import typer.main

import headwater
from headwater.cli import command_line, main
from tests.ports import free_port
from tests.serving import Server, serve

STREAMS = {
    "ls": ["ls"],
    "create": ["create", "a"],
    "append": ["append", "a", "1"],
    "read": ["read", "a"],
    "tail": ["tail", "a"],
    "head": ["head", "a"],
    "close": ["close", "a"],
    "fork": ["fork", "a", "b"],
    "delete": ["delete", "a", "--yes"],
    "ping": ["ping"],
    "bench": ["bench"],
    "bucket create": ["bucket", "create", "shop"],
    "bucket ls": ["bucket", "ls"],
    "bucket delete": ["bucket", "delete", "shop"],
    "snapshot publish": ["snapshot", "publish", "/ds/shop/a", "-"],
    "snapshot get": ["snapshot", "get", "/ds/shop/a"],
    "subscription create": ["subscription", "create", "s", "--pattern", "a/*", "--wake-stream", "w"],
    "subscription ls": ["subscription", "ls"],
    "subscription show": ["subscription", "show", "s"],
    "subscription link": ["subscription", "link", "s", "a"],
    "subscription unlink": ["subscription", "unlink", "s", "a"],
    "subscription delete": ["subscription", "delete", "s"],
}
STORES = {
    "backup": ["backup", "copy"],
    "restore": ["restore", "copy"],
    "store check": ["store", "check"],
    "store purge": ["store", "purge"],
    "store stats": ["store", "stats"],
    "store rotate-key": ["store", "rotate-key"],
    "store confirm-expiry": ["store", "confirm-expiry"],
    "store copy": ["store", "copy", "--from-mode", "file-durable", "--to-mode", "acid", "--to-dir", "other"],
}
WORKS_ON_A_CLUSTER = {"backup", "restore", "store check", "store stats", "store copy"}
STACK = {
    "up": ["up"],
    "down": ["down"],
    "status": ["status"],
    "logs": ["logs"],
    "token": ["token"],
    "psql": ["psql", "--print-url"],
    "store join-shards": ["store", "join-shards"],
    "cluster status": ["cluster", "status"],
}
OTHERS = {"serve": ["serve", "--port", "0"], "config show": ["config", "show"]}
PIPELINE = {
    "sync": ["sync"],
    "sync slots ls": ["sync", "slots", "ls"],
    "sync slots create": ["sync", "slots", "create", "s"],
    "sync slots drop": ["sync", "slots", "drop", "s"],
    "fold": ["fold", "a"],
    "query": ["query", "SELECT 1"],
    "archive run": ["archive", "run", "a", "--lake", "lake"],
    "archive compact": ["archive", "compact", "lake"],
    "archive show": ["archive", "show", "lake"],
    "archive migrate": ["archive", "migrate", "lake"],
    "shapes": ["shapes", "--port", "0", "--tables", "items"],
}
COMMANDS = STREAMS | STORES | STACK | OTHERS | PIPELINE

Result: TypeAlias = tuple[int, str]
Run: TypeAlias = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Call a command in this process, in an empty directory; return its exit code and stderr."""
    for name in list(os.environ):
        if name.startswith(("DS_", "POSTGRES_", "ELECTRIC_", "RUST_LOG")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, stdin: str = "") -> Result:
        capfd.readouterr()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        code = ended.value.code
        assert isinstance(code, int)
        return code, capfd.readouterr().err

    return call


def reports(result: Result, *expected: str) -> None:
    code, stderr = result
    assert code not in {0, None}, stderr
    assert "Traceback" not in stderr
    assert stderr.startswith("headwater: "), stderr
    assert stderr.count("\n") == 1, stderr
    assert len(stderr) > len("headwater: \n"), "the message is empty"
    for text in expected:
        assert text in stderr, stderr


def leaves(group: Any, path: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        full = f"{path} {name}".strip()
        if hasattr(command, "commands"):
            yield from leaves(command, full)
        else:
            yield full


def test_every_command_is_in_these_lists() -> None:
    # `sync` is a command and a group.
    assert {*leaves(typer.main.get_command(command_line())), "sync"} == set(COMMANDS)


# Unknown options of `headwater psql` are passed to psql.
@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"psql"}))
def test_unknown_option_is_reported(run: Run, name: str) -> None:
    reports(run(*COMMANDS[name], "--no-such-option"), "--no-such-option")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lss"], ["'ls'", "`headwater -h`"]),
        (["create"], ["STREAM", "`headwater create -h`"]),
        (["bucket", "list"], ["list", "`headwater bucket -h`"]),
        (["ping", "http://localhost", "http://localhost"], ["extra argument", "`headwater ping -h`"]),
        (["serve", "--mode", "foo"], ["'--mode': 'foo' is not one of 'memory'", "`headwater serve -h`"]),
    ],
)
def test_usage_errors_say_where_the_usage_is_described(run: Run, words: list[str], said: list[str]) -> None:
    reports(run(*words), *said)


@pytest.mark.parametrize("command", STREAMS.values(), ids=STREAMS)
def test_without_a_server_the_message_says_how_to_start_one(run: Run, command: list[str]) -> None:
    reports(run(*command, "--url", f"http://127.0.0.1:{free_port()}"), "127.0.0.1", "headwater serve")


@pytest.mark.parametrize("command", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("url", ["ftp://localhost", "http://", "http://[::1", "http://localhost:99999", "http://a b"])
def test_invalid_url_is_reported(run: Run, command: list[str], url: str) -> None:
    reports(run(*command, "--url", url), url)


@pytest.mark.parametrize("command", [*STORES.values(), *OTHERS.values()], ids=[*STORES, *OTHERS])
def test_invalid_settings_file_is_reported_with_its_line(run: Run, tmp_path: Path, command: list[str]) -> None:
    reports(run(*command, "--config", "missing.toml"), "missing.toml", "no such file")
    (tmp_path / "broken.toml").write_text("[server]\nport = \n")
    reports(run(*command, "--config", "broken.toml"), "broken.toml", "line 2")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    reports(run(*command, "--config", "binary.toml"), "binary.toml")
    reports(run(*command, "--config", "."), "cannot be read")
    reports(run(*command, "--profile", "none-such"), "none-such", "dev, prod")


@pytest.mark.parametrize("command", STACK.values(), ids=STACK)
def test_invalid_settings_file_of_the_stack_is_reported(run: Run, command: list[str]) -> None:
    reports(run(*command, "--config", "missing.toml"), "missing.toml", "no such file")


@pytest.mark.parametrize("command", STORES.values(), ids=STORES)
def test_directory_that_is_not_a_store_is_reported(run: Run, tmp_path: Path, command: list[str]) -> None:
    option = "--from-dir" if command[1] == "copy" else "--data-dir"
    (tmp_path / "file").write_text("not a directory")
    for directory in ("nothing", "file", "file/below"):
        reports(run(*command, option, directory))


@pytest.mark.parametrize("name", sorted(STORES.keys() - WORKS_ON_A_CLUSTER))
def test_command_for_a_directory_says_what_to_do_with_a_cluster(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    reports(run(*STORES[name], "--mode", "cluster"), "headwater store copy --from-mode cluster")
    monkeypatch.setenv("DS_STORAGE__MODE", "cluster")
    reports(run(*STORES[name]), "headwater store copy --from-mode cluster")


def test_mistakes_with_backups_of_a_cluster_are_reported(run: Run) -> None:
    reports(run("backup", "there", "--mode", "cluster"), "needs cluster.postgres_url and storage.cold")
    reports(run("restore", "there", "--mode", "cluster"), "there does not exist, so there is no BACKUP file")
    reports(run("restore", "there", "--mode", "cluster", "--force"), "a cluster cannot be replaced")
    reports(run("restore", "there", "--mode", "cluster", "--data-dir", "d"), "a cluster has no data directory")


def test_mistakes_with_the_store_of_a_cluster_are_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reports(run("store", "check", "--mode", "cluster"), "needs cluster.postgres_url and storage.cold")
    reports(run("store", "stats", "--mode", "cluster", "--data-dir", "d"), "a cluster has no data directory")
    from_directory = ["store", "copy", "--from-mode", "file-durable", "--from-dir", "d"]
    reports(run(*from_directory, "--to-mode", "cluster", "--to-dir", "other"), "leave out --to-dir")
    reports(run(*from_directory, "--to-mode", "acid"), "--to-mode acid needs --to-dir")
    reports(run("store", "copy", "--from-mode", "cluster", "--to-mode", "cluster"), "copy it into a directory first")
    monkeypatch.setitem(sys.modules, "headwater.cluster.nodes.copying", None)
    monkeypatch.delattr("headwater.cluster.nodes.copying", raising=False)
    reports(run("store", "check", "--mode", "cluster"), "pip install 'headwater[cluster]'")


@pytest.mark.parametrize("command", [*STACK.values(), ["up", "--detach"]], ids=[*STACK, "up --detach"])
def test_unusable_stack_directory_is_reported(run: Run, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "file").write_text("not a directory")
    reports(run(*command, "--data-dir", "file/below"), "file/below")


def test_without_envoy_the_message_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PROXY__ENVOY_PATH", "nowhere/envoy")
    monkeypatch.setenv("DS_SERVER__PORT", str(free_port()))
    monkeypatch.setenv("DS_PROXY__PORT", str(free_port()))
    reports(run("up", "--plain"), "nowhere/envoy")


@pytest.mark.parametrize("command", PIPELINE.values(), ids=PIPELINE)
def test_command_without_its_extra_says_what_to_install(
    run: Run, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("pyspark", "pyarrow", "deltalake", "psycopg", "uvicorn", "pandas", "numpy"):
        for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)
    for name in [
        name
        for name in sys.modules
        if name.startswith(("headwater.pipeline", "headwater.spark", "headwater.postgres", "headwater.shapes"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    reports(run(*command), "pip install", "headwater[")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as started:
        httpx.put(f"{started.url}/v1/stream/json", headers={"Content-Type": "application/json"}).raise_for_status()
        yield started


def test_invalid_json_is_reported_with_its_line(run: Run, server: Server) -> None:
    reports(run("append", "json", "--url", server.url, stdin='{"a":1}\n{"a":\n'), "line 2")
    reports(run("append", "json", "{broken", "--url", server.url), "{broken")


@pytest.mark.parametrize("command", STREAMS.values(), ids=STREAMS)
def test_url_without_a_scheme_is_reported_with_the_valid_schemes(run: Run, command: list[str]) -> None:
    reports(run(*command, "--url", "localhost:4437"), "localhost:4437", "http://")


def test_url_without_a_scheme_is_reported_by_commands_with_spark(run: Run) -> None:
    expected = "--url: 'localhost:4437' does not begin with http:// or https://, as in http://localhost:4437"
    reports(run("query", "SELECT 1", "--url", "localhost:4437"), expected)
    reports(run("ls", "--url", "localhost:4437"), expected)


def test_https_to_a_server_without_tls_says_which_scheme_to_use(run: Run, server: Server) -> None:
    reports(run("ls", "--url", server.url.replace("http://", "https://")), "does not use TLS", "http://")


@pytest.mark.parametrize("name", ["ls", "create", "append", "read", "tail", "head", "close", "fork", "delete"])
def test_server_of_another_protocol_is_recognized(run: Run, server: Server, name: str) -> None:
    reports(run(*STREAMS[name], "--url", f"{server.url}/ui/elsewhere"))


@pytest.mark.parametrize("name", ["create", "append", "read", "tail", "head", "close", "fork", "delete"])
def test_invalid_stream_name_is_an_error(run: Run, server: Server, name: str) -> None:
    arguments = [argument if argument != "a" else "a/../b" for argument in STREAMS[name]]
    reports(run(*arguments, "--url", server.url))


@pytest.mark.parametrize("command", [["snapshot", "publish", "plain", "-"], ["snapshot", "get", "plain"]])
def test_a_stream_without_a_bucket_has_no_snapshots(run: Run, server: Server, command: list[str]) -> None:
    httpx.put(f"{server.url}/v1/stream/plain").raise_for_status()
    reports(run(*command, "--url", server.url), "/ds/BUCKET/STREAM", "'plain'")
    listed = httpx.get(f"{server.url}/v1/stream/__ds/streams", params={"prefix": "plain/"}).json()
    assert listed["streams"] == [], "nothing was written under another name"


def test_extras_are_quoted_for_shells_that_expand_brackets() -> None:
    package = Path(headwater.__file__).parent
    pages = [*package.parents[1].glob("docs/**/*.md"), *package.rglob("*.py")]
    found = [path.name for path in pages if re.search(r"install headwater\[", path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("selec 1", "'selec' does not begin an SQL statement; did you mean SELECT?"),
        ("/* a comment */ (frm a)", "did you mean FROM?"),
        ("1 + 1", "most begin with SELECT, FROM or WITH"),
        (" ", "the query is empty"),
    ],
)
def test_misspelled_query_is_reported_without_starting_spark(
    text: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater.pipeline import session

    def unexpected(*_: object) -> None:
        pytest.fail("Spark takes several seconds to start")

    monkeypatch.setattr(session, "spark_session", unexpected)
    with pytest.raises(SystemExit) as ended:
        main(["query", text])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_restore_says_whether_the_backup_or_its_list_is_missing(run: Run, tmp_path: Path) -> None:
    options = ["--mode", "file-durable", "--data-dir", "restored"]
    reports(run("restore", "nothing", *options), "nothing does not exist, so there is no BACKUP file")
    (tmp_path / "empty").mkdir()
    reports(run("restore", "empty", *options), "empty is not a backup: it has no BACKUP file")
