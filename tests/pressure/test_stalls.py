"""No operation blocks the event loop: CPU time per iteration in every run, wall-clock stalls with `--long`."""

from __future__ import annotations

from functools import partial

import pytest

from tests.measured import least
from tests.pressure.load import Load, Operation
from tests.pressure.operations import OPERATIONS
from tests.pressure.stalls import STALL_MAX_MS, cpu_of, wall_of
from tests.serving import serve

SYNCS_MAX = 1
READ_MAX = 1024 * 1024
"""The blocking calls allowed in one iteration: an inline commit syncs once, and a slice is read from a file."""
MODES = sorted({operation.mode for operation in OPERATIONS})


def cpu_ms(operation: Operation) -> float:
    return cpu_of([operation])[operation.name].cpu_ms


@pytest.mark.parametrize("mode", MODES)
def test_no_iteration_of_the_loop_takes_more_cpu_time_than_50_ms(mode: str) -> None:
    operations = [operation for operation in OPERATIONS if operation.mode == mode]
    found = cpu_of(operations)
    over = {
        operation.name: found[operation.name]
        for operation in operations
        if found[operation.name].cpu_ms > STALL_MAX_MS
        and least(partial(cpu_ms, operation), STALL_MAX_MS) > STALL_MAX_MS
    }
    assert not over, f"CPU time of one iteration beyond {STALL_MAX_MS:g} ms: {over}"
    blocking = {name: worst for name, worst in found.items() if worst.syncs > SYNCS_MAX or worst.read_bytes > READ_MAX}
    assert not blocking, f"blocking calls on the loop in one iteration: {blocking}"
    assert all(worst.iterations > 0 for worst in found.values())


def heads(load: Load) -> None:
    load.must("HEAD", "/healthz")


def test_meter_shows_a_request_that_blocks_the_loop() -> None:
    worst = cpu_of([Operation("head", "a HEAD that computes", heads)], fault="stalls_on_heads")["head"]
    assert worst.cpu_ms > STALL_MAX_MS
    assert "_read_ready" in worst.callback


def test_meter_shows_a_request_that_waits_for_the_disk() -> None:
    worst = cpu_of([Operation("head", "a HEAD that reads and syncs", heads)], fault="blocks_on_heads")["head"]
    assert worst.syncs > SYNCS_MAX
    assert worst.read_bytes > READ_MAX


def test_probe_shows_a_request_that_blocks_the_loop() -> None:
    """Several, because the probe may have no CPU during one of them."""

    def several(load: Load) -> None:
        for _ in range(10):
            heads(load)

    found = wall_of(Operation("head", "HEADs that compute", several), 1.0, ("tests.pressure.faults", "stalls_on_heads"))
    assert found["worst_own_ms"] > STALL_MAX_MS, found


def test_input_is_complete_after_some_of_it_was_refused_for_a_moment() -> None:
    with serve(program=("tests.pressure.faults", "refuses_some_appends")) as server:
        Load(server, 1.0).fill("/v1/stream/long", 30 * 100, 100)
        assert len(Load(server, 1.0).must("GET", "/v1/stream/long?offset=-1").body) == 30 * 100


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: str(operation.name))
def test_no_client_waits_longer_than_50_ms_for_another(operation: Operation) -> None:
    found = wall_of(operation, 1.0)
    # A machine that stalls without load cannot show less.
    assert found["worst_ms"] <= max(STALL_MAX_MS, 2 * found["quiet_worst_ms"]), found
