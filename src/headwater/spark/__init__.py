"""Durable streams in Spark: a source and a sink with exactly-once, and what a session needs for them.

Talks to servers over HTTP only, and imports nothing of our server. `pip install headwater[spark]` on every node is
all: Spark finds `format("headwater")` by itself. Every Python worker imports this module, so what only a driver needs
(`progress`) is imported by name.
"""

from __future__ import annotations

from headwater.spark.arranging import by_target
from headwater.spark.session import conf_lines, configure, recommended_settings
from headwater.spark.source import HeadwaterSource

__all__ = [
    "HeadwaterSource",
    "by_target",
    "conf_lines",
    "configure",
    "recommended_settings",
]
