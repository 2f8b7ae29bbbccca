"""The log filter language."""

from __future__ import annotations

import logging

import pytest

from headwater.config.filters import OFF, TRACE, LogFilter


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("info", LogFilter(logging.INFO)),
        ("DEBUG", LogFilter(logging.DEBUG)),
        ("warning", LogFilter(logging.WARNING)),
        ("off", LogFilter(OFF)),
        ("trace", LogFilter(TRACE)),
        ("headwater=debug", LogFilter(logging.INFO, (("headwater", logging.DEBUG),))),
        ("warn, headwater.http = debug", LogFilter(logging.WARNING, (("headwater.http", logging.DEBUG),))),
        ("headwater::http=error,debug", LogFilter(logging.DEBUG, (("headwater.http", logging.ERROR),))),
        ("durable_streams=debug", LogFilter(logging.INFO, (("headwater", logging.DEBUG),))),
        ("warn,durable_streams::handlers=trace", LogFilter(logging.WARNING, (("headwater", TRACE),))),
        ("durable_streams_server", LogFilter(logging.INFO, (("headwater", TRACE),))),
        ("info,tower_http=debug", LogFilter(logging.INFO, (("tower_http", logging.DEBUG),))),
        ("headwater.engine", LogFilter(logging.INFO, (("headwater.engine", TRACE),))),
    ],
)
def test_filter_is_parsed(text: str, parsed: LogFilter) -> None:
    assert LogFilter.parse(text) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "bogus",
        "debgu",
        "info,bogus",
        "headwaters",
        "",
        ",",
        "info,",
        "=debug",
        "headwater=",
        "a=b=c",
        "a b",
        "headwater[span]=info",
    ],
)
def test_invalid_filter_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="neither a level nor module=level"):
        LogFilter.parse(text)
