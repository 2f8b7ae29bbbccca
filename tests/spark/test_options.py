"""Options: documentation, defaults, and errors for invalid values."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.spark import conf_lines
from headwater.spark.errors import OptionError
from headwater.spark.option_table import OPTIONS
from headwater.spark.options import sink_options, source_options
from headwater.spark.source import HeadwaterSource

URL = {"url": "http://localhost:4437/v1/stream"}


def test_docstring_of_the_source_lists_the_options() -> None:
    assert HeadwaterSource.__doc__ is not None
    for option in OPTIONS:
        assert f"``{option.name}``" in HeadwaterSource.__doc__


def test_docs_name_the_settings_of_a_session() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "spark.md").read_text(encoding="utf-8")
    for line in conf_lines():
        assert line in page, f"docs/spark.md must name the setting {line}"


def test_defaults_are_compatible() -> None:
    source = source_options(URL | {"streams": "a, b"})
    sink = sink_options(URL | {"stream": "a"})
    assert source.streams == ("a", "b")
    assert source.bytes_per_batch_max < sink.request_bytes_max, "a batch of the source must fit one append of the sink"


def test_error_for_a_misspelt_option_suggests_the_correct_one() -> None:
    with pytest.raises(OptionError, match="Did you mean startingOffsets"):
        source_options(URL | {"streams": "a", "startingOffset": "latest"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"streams": "a"}, "url must be the stream root"),
        (URL, "Nothing to read"),
        (URL | {"streams": "a", "prefix": "b"}, "streams cannot be combined with prefix"),
        (URL | {"streams": "a", "maxRowsPerBatch": "many"}, "maxRowsPerBatch must be a whole number"),
        (URL | {"streams": "a", "onGone": "ignore"}, "onGone must be fail or restart or bootstrap or skip"),
        (URL | {"streams": "a", "startingOffsets": "{"}, "not valid JSON"),
        (URL | {"streams": "a", "startingOffsets": '{"a": 5}'}, "must map stream names"),
        (URL | {"streams": "a", "endingOffsets": "earliest"}, "is empty"),
        (URL | {"streams": "a", "tokenFile": "/no/such/file"}, "there is no file"),
        (URL | {"streams": "a", "createMissing": "true"}, "The source has no option"),
    ],
)
def test_invalid_source_options_are_reported(given: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        source_options(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"commitMode": "driver"}, "needs one target"),
        ({"onDifferingRetry": "keep"}, "ondifferingretry was removed"),
        ({"rowsAs": "lines"}, "for targets that are not JSON"),
        ({"contentType": "text/plain", "commitMode": "task"}, "set orderBy to a unique key"),
        ({"createMissing": "yes"}, "createMissing must be true or false"),
    ],
)
def test_invalid_sink_options_are_reported(given: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        sink_options(URL | given)


def test_url_of_a_bucket_is_derived_from_the_root() -> None:
    connection = source_options(URL | {"bucket": "agents"}).connection
    assert connection.root == "http://localhost:4437/ds/agents"


def test_token_is_not_in_the_repr() -> None:
    assert "s3cret" not in repr(source_options(URL | {"streams": "a", "token": "s3cret"}))


@pytest.mark.parametrize(
    ("given", "seconds"), [("900", 900.0), ("15m", 900.0), ("1.5 s", 1.5), ("500ms", 0.5), ("2h", 7200.0)]
)
def test_delay_of_a_trigger_has_a_unit_or_is_in_seconds(given: str, seconds: float) -> None:
    assert source_options(URL | {"streams": "a", "maxTriggerDelay": given}).batch_delay_max_s == seconds
