"""The limits in docs/limits.md: those that are settings, and those that are fixed."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from scripts.generated_docs.markdown import table
from scripts.generated_docs.setting_tables import default
from scripts.generated_docs.source import PACKAGE, parsed

from headwater.config.describe import described_settings

_LIMIT_KEY = re.compile(r"max_|.*_max_|.*_timeout_secs$|.*_concurrency|.*_per_host|hot_tail_bytes|cold_.*_bytes")
FIXED_LIMITS = {
    "http.flow": (
        "PIPELINE_MAX_REQUESTS",
        "PIPELINE_MAX_BYTES",
        "REQUEST_BYTES",
        "FIELD_BYTES",
        "POSTPONED_BYTES",
        "PARSE_BYTES",
        "TURN_REQUESTS",
        "TURN_BYTES",
        "TURNS_S",
        "QUICK_S",
        "QUICK_TURNS",
    ),
    "http.context": ("REFUSED_MAX",),
    "http.parser": ("UNCOUNTED_BODY_BYTES", "BULK_AHEAD", "BODY_PROGRESS_BYTES", "UPLOAD_PROGRESS_BYTES"),
    "http.connection": ("UNSENT_BYTES", "LINGER_S"),
    "http.deadlines": ("DUE_S",),
    "http.forwarding": ("ELEMENTS_MAX",),
    "http.json_bodies": ("BODY_MAX_BYTES",),
    "http.snapshots": ("IN_MEMORY_MAX_BYTES",),
    "http.sse": ("STEP_BYTES", "STEP_MESSAGES", "LARGE_BYTES", "HOLD_S"),
    "http.sse_encoding": ("HOLD_MAX_BYTES",),
    "http.compression": ("CHUNK_MAX_BYTES", "KEPT_MAX_BYTES", "RUNNING_MAX", "ACCEPT_MAX_BYTES"),
    "http.head_cache": ("HEAD_MAX_BYTES", "KNOWN_MAX"),
    "http.bounded_cache": ("REPLACED_MAX",),
    "http.routing": ("ADDRESS_CACHE_MAX",),
    "http.access": ("KNOWN_HOSTS_MAX",),
    "http.follow": ("NAMES_MAX", "OFFSET_MAX_CHARS"),
    "http.follow_sessions": ("IDLE_S", "SENT_MAX", "SENT_TOTAL_MAX"),
    "http.followed_events": ("LARGE_BYTES",),
    "http.find": ("SCAN_BYTES", "MESSAGES_MAX", "MATCHES_MAX", "MATCH_BYTES_MAX", "TEXT_MAX"),
    "http.ranges": ("SPLITS_MAX", "FRAMES_MAX"),
    "engine.uploads": ("FULL_BYTES",),
    "engine.reading": ("SLICE_BYTES",),
    "engine.slices": ("SLICE_S", "STEPS_MAX"),
    "engine.publisher": ("AT_ONCE_MAX",),
    "engine.multi_stream_follow": ("STEP_BYTES", "STEP_MESSAGES"),
    "engine.stream_index": ("AT_ONCE_MAX",),
    "engine.change_log": ("CHANGES_MAX",),
    "engine.sweeper": ("SWEEP_S", "SWEEP_MAX"),
    "engine.retention": ("CHECKED_MAX",),
    "engine.subscription": ("REPORTED_MAX",),
    "engine.subscriptions": ("LINKS_PAGE_MAX",),
    "engine.call_queue": ("KNOWN_HOSTS_MAX",),
    "engine.waiting_appends": ("WAITS_FROM_BYTES", "WAIT_S", "ADMITTED_BYTES"),
    "core.content": ("TYPE_MAX_CHARS",),
    "core.globs": ("SEGMENTS_MAX", "ANY_MAX", "GROUP_BITS_MAX"),
    "core.json_steps": ("STEP_BYTES", "SCAN_STEP_BYTES"),
    "core.producers": ("ID_MAX_BYTES", "DIGESTS_KEPT"),
    "core.leases": ("HOLDER_MAX_CHARS", "FINAL_MAX_BYTES"),
    "core.subscriptions": ("ID_MAX_BYTES", "WORKER_MAX_CHARS", "URL_MAX_CHARS"),
    "core.buckets": ("KEY_MAX_BYTES", "PAGE_MAX"),
    "core.fencing": ("BOUND_MAX",),
    "storage.maintenance": ("REFUSE_FACTOR",),
    "cluster.peers": ("WRITE_BUFFER_BYTES",),
    "cluster.frames": ("PAYLOAD_MAX_BYTES",),
    "cluster.relay": ("MOVED_MAX_BYTES",),
    "cluster.relayed": ("IDLE_TUNNELS_MAX",),
    "cluster.tails": ("UPDATE_MAX_BYTES",),
    "cluster.followed_streams": ("KEPT_BYTES", "KEPT_MAX_BYTES"),
    "cluster.multi_worker_follow": ("AHEAD_BYTES", "TURN_BYTES"),
    "cluster.fencing": ("CLAIMS_MAX",),
    "cluster.nodes.refusals": ("REFUSED_MAX", "ACCEPTED_MAX"),
}
"""Limits that no setting changes, by module. Each has a docstring that says what it limits."""
OTHER_MAXIMA = {
    "core.addresses": {"HOST_MAX_CHARS", "LABEL_MAX_CHARS"},
    "core.cursors": {"JITTER_MAX_SECS", "DIGITS_MAX"},
    "core.expiry": {"TTL_MAX_SECS"},
    "core.producers": {"NUMBER_MAX"},
    "core.retention": {"MARKS_MAX"},
    "core.signing": {"JWKS_MAX_AGE_S"},
    "core.subscriptions": {"LEASE_TTL_MAX_MS", "RETRY_MAX_MS"},
    "engine.commit_placement": {"INLINE_MAX_S", "STALL_HOLD_MAX_S", "PROBE_MAX_BYTES"},
    "engine.descriptors": {"SOFT_MAX"},
    "engine.freed_memory": {"FREE_MAX_BYTES"},
    "engine.interpreter": {"KEPT_MAX"},
    "engine.sweeper": {"REBUILD_MAX"},
    "engine.webhooks": {"RESPONSE_MAX_BYTES"},
    "http.headers": {"PREFLIGHT_MAX_AGE_S"},
    "cluster.messages": {"PACKET_MAX_BYTES"},
    "cluster.nodes.postgres_journal": {"BATCH_MAX_BYTES"},
    "cluster.nodes.standby_reads": {"RECORDS_MAX"},
    "cluster.shards": {"OWNERS_CACHE_MAX"},
    "cluster.supervisor": {"BACKOFF_MAX_S"},
}
"""Maxima that limit no memory, work or waiting that a client can cause, or repeat a limit of a standard."""
_MAXIMUM = re.compile(r"[A-Z][A-Z_]*_MAX(_[A-Z]+)?")


def limits_page() -> str:
    _check_maxima()
    fixed = table("| module | limit | value | what it limits |", _fixed_limits())
    return f"{_limits_table()}\n\n## Fixed limits\n\nNo setting changes these.\n\n{fixed}"


def _fixed_limits() -> Iterator[tuple[str, str, str, str]]:
    for module, names in FIXED_LIMITS.items():
        values = importlib.import_module(f"headwater.{module}")
        texts = _constant_docstrings(PACKAGE / f"{module.replace('.', '/')}.py")
        for name in names:
            yield f"`{module}`", f"`{name}`", f"{getattr(values, name):,}", texts[name]


def _check_maxima() -> None:
    """Every maximum of the packages that serve clients is in one of the two lists."""
    packages = ("core", "engine", "http", "cluster")
    for path in sorted(path for package in packages for path in PACKAGE.glob(f"{package}/**/*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        known = {*FIXED_LIMITS.get(module, ()), *OTHER_MAXIMA.get(module, ())}
        for constant in parsed(path).body:
            if isinstance(constant, ast.AnnAssign) and isinstance(constant.target, ast.Name):
                name = constant.target.id
                if _MAXIMUM.fullmatch(name) and name not in known:
                    raise SystemExit(f"add {name} of {module} to FIXED_LIMITS or OTHER_MAXIMA in {__file__}")


def _constant_docstrings(path: Path) -> dict[str, str]:
    """The docstring after each constant of a module."""
    return {
        constant.target.id: " ".join(text.value.value.split())
        for constant, text in pairwise(parsed(path).body)
        if isinstance(constant, ast.AnnAssign)
        and isinstance(constant.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _limits_table() -> str:
    """Every setting that limits the memory, work or waiting that a client can cause."""
    rows = (
        (f"`{setting.section}.{setting.key}`", default(setting), setting.description)
        for setting in described_settings()
        if setting.section not in NO_LIMITS
        and (_LIMIT_KEY.match(setting.key) or setting.section == "limits")
        and setting.description
    )
    return table("| setting | default | beyond it |", rows)


NO_LIMITS = {"auth", "proxy", "stack", "retention"}
"""Sections about other programs, or about data that is kept on purpose."""
