"""The values that settings accept, and values that are derived from several settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from headwater.config import ConfigError, HttpSettings, LogSettings, Settings, load_settings
from headwater.config.describe import described_settings


def settings(**environ: str) -> Settings:
    return load_settings(None, None, environ, Path("/nonexistent")).settings


# Defaults of the protocol's reference server, by its variable names. CORS differs: see decision O-3.
REFERENCE_DEFAULTS = {
    "DS_SERVER__PORT": "4437",
    "DS_SERVER__LONG_POLL_TIMEOUT_SECS": "30",
    "DS_SERVER__SSE_RECONNECT_INTERVAL_SECS": "60",
    "DS_HTTP__CORS_ORIGINS": "",
    "DS_LIMITS__MAX_MEMORY_BYTES": "104857600",
    "DS_STORAGE__MODE": "memory",
    "DS_STORAGE__DATA_DIR": "data/streams",
    "DS_STORAGE__ACID_SHARD_COUNT": "16",
    "DS_TLS__CERT_PATH": "",
    "DS_TLS__KEY_PATH": "",
    "DS_LOG__RUST_LOG": "info",
}


def test_the_reference_servers_variables_and_defaults_are_ours() -> None:
    defaults = {setting.variable: setting.default for setting in described_settings()}
    assert {name: defaults.get(name) for name in REFERENCE_DEFAULTS} == REFERENCE_DEFAULTS


def test_every_setting_has_a_description_and_its_default_is_accepted() -> None:
    for setting in described_settings():
        assert setting.description.endswith("."), setting
        if setting.default:
            given = settings(**{setting.variable: setting.default})
            section = getattr(given, setting.section)
            assert getattr(section, setting.key) == getattr(getattr(Settings(), setting.section), setting.key)


def test_the_stream_limit_depends_on_the_mode() -> None:
    assert settings().max_stream_bytes == 10_485_760
    assert settings(DS_STORAGE__MODE="file-durable").max_stream_bytes is None
    assert settings(DS_STORAGE__MODE="file-durable", DS_LIMITS__MAX_STREAM_BYTES="7").max_stream_bytes == 7
    assert settings(DS_LIMITS__MAX_STREAM_BYTES="0").max_stream_bytes is None
    assert settings(DS_LIMITS__MAX_STREAM_BYTES="").max_stream_bytes == 10_485_760


def test_redb_is_an_alias_of_acid() -> None:
    assert settings(DS_STORAGE__MODE="redb").storage.mode == "acid"


@pytest.mark.parametrize("count", [1, 2, 16, 256])
def test_shard_counts_are_powers_of_two(count: int) -> None:
    assert settings(DS_STORAGE__ACID_SHARD_COUNT=str(count)).storage.acid_shard_count == count


@pytest.mark.parametrize("count", ["0", "3", "257", "512", "-1", "1.5"])
def test_other_shard_counts_are_refused(count: str) -> None:
    with pytest.raises(ConfigError, match="power of two from 1 to 256"):
        settings(DS_STORAGE__ACID_SHARD_COUNT=count)


@pytest.mark.parametrize(
    ("given", "origins"),
    [
        ("*", ("*",)),
        ("", ()),
        ("https://a.example", ("https://a.example",)),
        (" https://a.example , http://b.example:8080,", ("https://a.example", "http://b.example:8080")),
        ("https://a.example,*", ("*",)),
    ],
)
def test_origins_are_split(given: str, origins: tuple[str, ...]) -> None:
    assert HttpSettings(cors_origins=given).origins == origins


@pytest.mark.parametrize("given", ["a.example", "https://a.example/", "https://a.example/path", "https://*.example"])
def test_malformed_origin_is_refused(given: str) -> None:
    with pytest.raises(ValidationError, match="is not a valid origin"):
        HttpSettings(cors_origins=given)


@pytest.mark.parametrize("variable", ["DS_SERVER__PORT", "DS_SERVER__IDLE_TIMEOUT_SECS"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "true", "", "1e99"])
def test_text_is_not_accepted_as_a_number(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match="it takes a"):
        settings(**{variable: value})


def test_boolean_is_not_a_number(tmp_path: Path) -> None:
    (tmp_path / "slip.toml").write_text("[server]\nport = true\n")
    with pytest.raises(ConfigError, match=r"server\.port: got True from slip\.toml"):
        load_settings(None, Path("slip.toml"), {}, tmp_path)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Settings().server.port = 1  # type: ignore[misc]


def test_building_settings_by_hand_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_SERVER__PORT", "1")
    assert Settings().server.port == 4437


def test_the_log_filter_is_checked_when_set() -> None:
    assert LogSettings(rust_log="warn,headwater.http=debug").filter.modules == (("headwater.http", 10),)
    with pytest.raises(ValidationError):
        LogSettings(rust_log="headwater=loud")


def test_further_roots_are_aliases() -> None:
    assert settings(DS_SERVER__ROOTS="/v1/stream, /streams,/streams").server.root_aliases == ("/streams",)
    assert settings(DS_SERVER__ROOTS="").server.root_aliases == ()


OTHER_PATHS = ("/ds", "/ds/a", "/ui", "/v1", "/v1/stream/a", "/a,/a/b", "/v1/shape", "/metrics")


@pytest.mark.parametrize(
    "roots",
    ["/", "streams", "/streams/", "/a//b", "/a/../b", "/%73", "/a?b", "/é", *OTHER_PATHS],
)
def test_ambiguous_root_is_rejected(roots: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.roots"):
        settings(DS_SERVER__ROOTS=roots)
