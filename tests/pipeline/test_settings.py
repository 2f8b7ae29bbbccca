"""The pipeline's settings: the reference's jobs by default, overridden by a file and the environment; errors."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headwater.cli import main
from headwater.config import ConfigError
from headwater.pipeline.from_postgres import FromPostgres
from headwater.pipeline.settings import load
from headwater.pipeline.supervisor import COMMAND, SERVICE
from headwater.pipeline.to_postgres import ToPostgres
from headwater.postgres.slots import SlotLostError


def written(directory: Path, text: str) -> Path:
    file = directory / "pipeline.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_without_a_file_the_reference_jobs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"DS_SERVER_URL": "http://server:4437", "POSTGRES_URL": "postgresql://u@db/d", "ELECTRIC_URL": "http://e"}
    settings = load(None, environ)
    assert settings.environment.streams == "http://server:4437/v1/stream"
    assert settings.environment.postgres == "postgresql://u@db/d"
    items, events = settings.jobs()
    assert isinstance(items, FromPostgres)
    assert isinstance(events, ToPostgres)
    assert (items.tables[0].table, items.tables[0].stream, items.tables[0].published) == (
        "items",
        "pg-items",
        frozenset({"insert"}),
    )
    assert (events.streams, events.table) == (("session-events",), "session_events")
    assert events.columns["event_key"] == "key"


def test_file_defines_the_jobs_and_flags_take_precedence(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        [pipeline]
        server = "http://one:1"
        checkpoints = "s3a://bucket/places"
        [[to_postgres]]
        name = "orders"
        prefix = "orders/"
        table = "shop.orders"
        columns = { s = "@stream", o = "@offset", amount = "sum.cents" }
        types = { amount = "bigint" }
        [[from_postgres]]
        tables = [{ table = "docs", stream = "docs/{key}", format = "changes", full_rows = true }]
        [[archive]]
        lake = "/lake"
        streams = ["a"]
        """,
    )
    settings = load(file, {"DS_SERVER_URL": "http://two:2"}, {"server": "http://three:3/v1/stream/", "master": None})
    assert settings.environment.streams == "http://three:3/v1/stream"
    assert settings.environment.checkpoint("x") == "s3a://bucket/places/x"
    assert [job.name for job in settings.jobs()] == ["pg-items", "orders", "archive"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[pipeline]\nservr = 1", "pipeline.servr: no such setting"),
        ("[[to_postgres]]\ntable = 't'", "name what to read"),
        ("[[to_postgres]]\nstreams = ['s']\ncolumns = { a = '@stream' }", "they are the key"),
        ("[[from_postgres]]\nslot = 'Not Good'\ntables = [{ table = 't', stream = 's' }]", "from_postgres.0.slot"),
        (
            "[[from_postgres]]\ntables = [{ table = 'a', stream = 's', format = 'changes' },"
            " { table = 'b', stream = 's', format = 'changes' }]",
            "needs its own stream",
        ),
        ("[[to_postgres]]\nname='x'\nstreams=['s']\n[[to_postgres]]\nname='x'\nstreams=['s']", "two jobs are called x"),
        ("[[from_postgres]]\ntables = [{ table = 't', stream = 's', keys = 'x' }]", "tables.0.keys: no such setting"),
        ("[[fold]]\nbucket = 'b'\nevry = 2", "fold.0.evry: no such setting"),
        ("not toml", "not valid TOML"),
        ("[pipeline]\nserver = 'ftp://x'", "must begin with http"),
        ("[[fold]]\nbucket = 'b'\nevery = 'soon'", "fold.0.every: got 'soon'; it should be a valid integer"),
        ("[[to_postgres]]\nname = 'x'\nstreams = 's'", "to_postgres.0.streams: got 's'; it should be a valid list"),
    ],
)
def test_settings_errors_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    def use() -> None:
        load(written(tmp_path, text), {}).jobs()

    with pytest.raises(ConfigError, match=r"^[^\n]+$") as caught:
        use()
    assert said in str(caught.value)


@pytest.mark.parametrize("command", [["sync"], ["archive", "run", "a", "--lake", "lake"]])
def test_metrics_port_in_use_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            main([*command, "--metrics-port", str(port)])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert f"Cannot serve metrics on 127.0.0.1:{port}" in said
    assert "--metrics-port" in said
    assert "Traceback" not in said


def test_command_restarts_only_after_transient_errors() -> None:
    gone, bad = RuntimeError("headwater.spark.errors.DataGoneError: gone"), RuntimeError("bad option")
    assert COMMAND.allows(gone, 0)
    assert not COMMAND.allows(gone, 5)
    assert not COMMAND.allows(bad, 0)
    assert SERVICE.allows(bad, 1000)
    assert not SERVICE.allows(SlotLostError("the slot is gone"), 0)
    assert not SERVICE.allows(RuntimeError("…\nheadwater.postgres.slots.SlotLostError: gone"), 0)
