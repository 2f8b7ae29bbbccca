"""Settings from layers: later layers override earlier ones, and each value has its origin."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.config import ConfigError, LoadedSettings, load_settings

REPOSITORY = Path(__file__).resolve().parents[2]


def load(cwd: Path, profile: str | None = None, config: str | None = None, **environ: str) -> LoadedSettings:
    return load_settings(profile, Path(config) if config else None, environ, cwd)


def refusal(cwd: Path, profile: str | None = None, config: str | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(cwd, profile, config, **environ)
    line = str(refused.value)
    assert "\n" not in line
    return line


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "config").mkdir()
    return tmp_path


def write(cwd: Path, name: str, text: str) -> None:
    (cwd / name).write_text(text, encoding="utf-8")


def port(text: int) -> str:
    return f"[server]\nport = {text}\n"


def test_without_files_or_variables_everything_is_default(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert loaded.settings.server.port == 4437
    assert set(loaded.origins.values()) == {"default"}


def test_each_layer_overrides_the_previous_ones(cwd: Path) -> None:
    loaded = load(cwd)
    assert (loaded.settings.server.port, loaded.origins["server.port"]) == (4437, "default")

    write(cwd, "config/default.toml", port(1))
    loaded = load(cwd)
    assert (loaded.settings.server.port, loaded.origins["server.port"]) == (1, "config/default.toml")

    write(cwd, "config/dev.toml", port(2))
    loaded = load(cwd, "dev")
    assert (loaded.settings.server.port, loaded.origins["server.port"]) == (2, "config/dev.toml")

    write(cwd, "config/local.toml", port(3))
    loaded = load(cwd, "dev")
    assert (loaded.settings.server.port, loaded.origins["server.port"]) == (3, "config/local.toml")

    write(cwd, "extra.toml", port(4))
    loaded = load(cwd, "dev", "extra.toml")
    assert (loaded.settings.server.port, loaded.origins["server.port"]) == (4, "extra.toml")

    loaded = load(cwd, "dev", "extra.toml", DS_SERVER__PORT="5")
    assert (loaded.settings.server.port, loaded.origins["server.port"]) == (5, "DS_SERVER__PORT")

    loaded = load_settings("dev", Path("extra.toml"), {"DS_SERVER__PORT": "5"}, cwd, flags={"server.port": "6"})
    assert (loaded.settings.server.port, loaded.origins["server.port"]) == (6, "--port")


def test_layers_merge_key_by_key(cwd: Path) -> None:
    write(cwd, "config/default.toml", '[server]\nport = 1\nhost = "0.0.0.0"\n')
    write(cwd, "config/dev.toml", "[server]\nport = 2\n")
    loaded = load(cwd, "dev", DS_SERVER__IDLE_TIMEOUT_SECS="9.5")
    assert loaded.settings.server.host == "0.0.0.0"
    assert loaded.settings.server.port == 2
    assert loaded.settings.server.idle_timeout_secs == 9.5


def test_another_profile_is_not_read(cwd: Path) -> None:
    write(cwd, "config/dev.toml", port(2))
    assert load(cwd).settings.server.port == 4437


def test_rust_log_overrides_its_key(cwd: Path) -> None:
    loaded = load(cwd, DS_LOG__RUST_LOG="warn", RUST_LOG="debug")
    assert loaded.settings.log.rust_log == "debug"
    assert loaded.origins["log.rust_log"] == "RUST_LOG"
    assert load(cwd, DS_LOG__RUST_LOG="warn", RUST_LOG="").settings.log.rust_log == "warn"


def test_level_is_an_alias_of_rust_log(cwd: Path) -> None:
    write(cwd, "config/default.toml", '[log]\nrust_log = "error"\n')
    write(cwd, "config/local.toml", '[log]\nlevel = "debug"\n')
    assert load(cwd).settings.log.rust_log == "debug"
    loaded = load(cwd, DS_LOG__LEVEL="warn")
    assert (loaded.settings.log.rust_log, loaded.origins["log.rust_log"]) == ("warn", "DS_LOG__LEVEL")


def test_error_for_a_missing_profile_lists_the_available_ones(cwd: Path) -> None:
    write(cwd, "config/dev.toml", "")
    write(cwd, "config/prod.toml", "")
    line = refusal(cwd, profile="staging")
    assert "config/staging.toml" in line
    assert "dev, prod" in line


def test_included_profiles_work_in_any_directory(cwd: Path) -> None:
    loaded = load(cwd, profile="prod")
    assert (loaded.settings.storage.mode, loaded.origins["storage.mode"]) == ("file-durable", "profile prod")
    assert loaded.settings.server.is_loopback
    assert load(cwd, profile="dev").settings.registry.enabled


def test_a_profile_of_the_directory_replaces_the_included_one(cwd: Path) -> None:
    write(cwd, "config/dev.toml", port(5))
    loaded = load(cwd, profile="dev")
    assert (loaded.settings.server.port, loaded.settings.storage.mode) == (5, "memory")


@pytest.mark.parametrize("name", ["../secrets", "a/b", "", ".hidden"])
def test_a_profile_is_a_name_not_a_path(cwd: Path, name: str) -> None:
    write(cwd, "secrets.toml", "")
    assert refusal(cwd, profile=name).startswith(f"--profile {name}:")


def test_a_missing_config_file_is_an_error(cwd: Path) -> None:
    assert refusal(cwd, config="nowhere.toml") == "--config nowhere.toml: no such file"


def test_an_absolute_config_file_is_named_as_given(cwd: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "my.toml"
    elsewhere.write_text(port(7))
    loaded = load(cwd, config=str(elsewhere))
    assert (loaded.settings.server.port, loaded.origins["server.port"]) == (7, str(elsewhere))


def test_invalid_toml_is_one_line_with_its_position(cwd: Path) -> None:
    write(cwd, "config/default.toml", "[server]\nport = \n")
    line = refusal(cwd)
    assert line.startswith("config/default.toml: not valid TOML")
    assert "line 2" in line


def test_a_file_that_is_not_text_is_an_error(cwd: Path) -> None:
    (cwd / "config/default.toml").write_bytes(b"\xff\xfe[server]")
    assert refusal(cwd) == "config/default.toml: not UTF-8 text"


def test_a_directory_in_place_of_a_file_is_an_error(cwd: Path) -> None:
    (cwd / "config/local.toml").mkdir()
    assert refusal(cwd).startswith("config/local.toml: cannot be read: ")


def test_an_unknown_key_in_a_file_hints_at_the_nearest(cwd: Path) -> None:
    write(cwd, "config/default.toml", "[server]\nprot = 1\n")
    expected = "server.prot: no such key (in config/default.toml); did you mean server.port?"
    assert refusal(cwd) == expected


def test_an_unknown_section_in_a_file_is_an_error(cwd: Path) -> None:
    write(cwd, "config/default.toml", "[servers]\nport = 1\n")
    expected = "servers: no such section (in config/default.toml); did you mean server?"
    assert refusal(cwd) == expected


def test_a_key_outside_of_a_section_is_an_error(cwd: Path) -> None:
    write(cwd, "config/default.toml", "server = 1\n")
    assert refusal(cwd).startswith("server: got 1 from config/default.toml; it takes a table")
    write(cwd, "config/default.toml", "port = 1\n")
    assert refusal(cwd).startswith("port: no such section")


def test_an_unknown_variable_of_a_known_section_is_an_error(cwd: Path) -> None:
    expected = "server.prot: no such key (in DS_SERVER__PROT); did you mean server.port?"
    assert refusal(cwd, DS_SERVER__PROT="1") == expected
    assert refusal(cwd, DS_SERVR__PORT="1").endswith("did you mean server?")


def test_variables_of_other_programs_are_ignored(cwd: Path) -> None:
    loaded = load(cwd, DS_SERVER_URL="http://server", DS_FLEET__REGION="x", DS_="", PATH="/bin")
    assert set(loaded.origins.values()) == {"default"}


@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        (
            "DS_SERVER__PORT",
            "70000",
            "server.port: got '70000' from DS_SERVER__PORT; it takes a whole number from 0 to 65535",
        ),
        (
            "DS_SERVER__PORT",
            "http",
            "server.port: got 'http' from DS_SERVER__PORT; it takes a whole number from 0 to 65535",
        ),
        (
            "DS_STORAGE__MODE",
            "disk",
            "storage.mode: got 'disk' from DS_STORAGE__MODE; it takes memory, file-fast, file-durable, acid or cluster",
        ),
        (
            "DS_STORAGE__ACID_SHARD_COUNT",
            "12",
            "storage.acid_shard_count: got '12' from DS_STORAGE__ACID_SHARD_COUNT;"
            " it takes a power of two from 1 to 256 (not a power of two)",
        ),
        (
            "DS_REGISTRY__ENABLED",
            "perhaps",
            "registry.enabled: got 'perhaps' from DS_REGISTRY__ENABLED; it takes true or false",
        ),
        (
            "DS_SERVER__LONG_POLL_TIMEOUT_SECS",
            "0",
            "server.long_poll_timeout_secs: got '0' from DS_SERVER__LONG_POLL_TIMEOUT_SECS;"
            " it takes a number above 0 and up to 604800",
        ),
        (
            "RUST_LOG",
            "headwater=loud",
            "log.rust_log: got 'headwater=loud' from RUST_LOG; it takes trace, debug, info, warn, error or"
            " off, or a list like info,headwater.http=debug"
            " ('headwater=loud' is neither a level nor module=level; levels are trace, debug, info, warn, warning,"
            " error, off)",
        ),
    ],
)
def test_invalid_value_is_reported_in_one_line(cwd: Path, variable: str, value: str, line: str) -> None:
    assert refusal(cwd, **{variable: value}) == line


def test_error_for_an_invalid_value_names_the_file(cwd: Path) -> None:
    write(cwd, "config/default.toml", '[limits]\nmax_chunk_bytes = "many"\n')
    line = refusal(cwd)
    assert line.startswith("limits.max_chunk_bytes: got 'many' from config/default.toml; it takes a whole number")


def test_long_or_multiline_value_is_shown_on_one_short_line(cwd: Path) -> None:
    line = refusal(cwd, DS_SERVER__PORT="x\n" * 500)
    assert len(line) < 250


@pytest.mark.parametrize("variable", ["DS_AUTH__TOKEN", "DS_CLUSTER__SECRET"])
def test_invalid_secret_is_not_printed(cwd: Path, variable: str) -> None:
    message = refusal(cwd, **{variable: "too short"})
    assert "too short" not in message
    assert f"got 9 characters from {variable}" in message
    assert "16 characters" in message


def test_half_a_tls_pair_is_an_error(cwd: Path) -> None:
    line = refusal(cwd, DS_TLS__CERT_PATH="/cert.pem")
    assert line == "tls: set both cert_path and key_path, or neither (set by DS_TLS__CERT_PATH)"
    assert refusal(cwd, DS_TLS__KEY_PATH="/key.pem").endswith("(set by DS_TLS__KEY_PATH)")
    assert load(cwd, DS_TLS__CERT_PATH="/c", DS_TLS__KEY_PATH="/k").settings.tls.enabled
    assert not load(cwd, DS_TLS__CERT_PATH="", DS_TLS__KEY_PATH="").settings.tls.enabled


@pytest.mark.parametrize(("profile", "allowed"), [(None, False), ("prod", False), ("dev", True)])
def test_only_the_dev_profile_allows_webhooks_to_this_machine(profile: str | None, allowed: bool) -> None:
    """`headwater up` loads no settings profile, with any profile of services, so it never allows them either."""
    loaded = load_settings(profile, None, {}, REPOSITORY)
    assert bool(loaded.settings.subscriptions.allow_local_webhooks) is allowed
