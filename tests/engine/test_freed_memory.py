"""Much freed memory is returned to the system, and little is not."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from headwater.engine.freed_memory import FREE_MAX_BYTES, INTERVAL_S, MemoryReturn

MIB = 1024 * 1024


class CountedAllocator:
    def __init__(self) -> None:
        self.free = 0
        self.resident = 100 * MIB
        self.trims = 0

    def free_bytes(self) -> int:
        return self.free

    def trim(self) -> None:
        self.trims += 1
        self.resident = 80 * MIB


@pytest.fixture
def allocator() -> CountedAllocator:
    return CountedAllocator()


@pytest.fixture
def memory(allocator: CountedAllocator) -> MemoryReturn:
    return MemoryReturn(allocator, lambda: allocator.resident)


def test_little_free_memory_is_not_returned(allocator: CountedAllocator, memory: MemoryReturn) -> None:
    allocator.free = FREE_MAX_BYTES - 1
    for turn in range(10):
        memory.check(turn * INTERVAL_S)
    assert allocator.trims == 0


def test_much_free_memory_is_returned_once(allocator: CountedAllocator, memory: MemoryReturn) -> None:
    allocator.free = FREE_MAX_BYTES
    for turn in range(10):
        memory.check(turn * INTERVAL_S)
    assert allocator.trims == 1, "returned memory still counts as free, but is not resident"


def test_memory_freed_again_is_returned_after_the_interval(allocator: CountedAllocator, memory: MemoryReturn) -> None:
    allocator.free = FREE_MAX_BYTES
    memory.check(INTERVAL_S)
    allocator.resident = 80 * MIB + FREE_MAX_BYTES
    memory.check(INTERVAL_S + 0.1)
    assert allocator.trims == 1, "not before the interval has passed"
    memory.check(2 * INTERVAL_S)
    assert allocator.trims == 2


def test_memory_in_use_at_the_last_return_is_returned_later(allocator: CountedAllocator, memory: MemoryReturn) -> None:
    allocator.free = FREE_MAX_BYTES
    memory.check(INTERVAL_S)
    allocator.free += FREE_MAX_BYTES
    memory.check(2 * INTERVAL_S)
    assert allocator.trims == 2, "the process has not grown, and has freed more"


def test_check_without_a_free_descriptor_is_repeated(allocator: CountedAllocator) -> None:
    def resident() -> int:
        if failing:
            raise OSError(errno.EMFILE, "Too many open files")
        return allocator.resident

    failing = True
    memory = MemoryReturn(allocator, resident)
    allocator.free = FREE_MAX_BYTES
    memory.check(INTERVAL_S)
    assert allocator.trims == 0
    failing = False
    memory.check(2 * INTERVAL_S)
    assert allocator.trims == 1


def test_memory_in_use_is_not_returned(allocator: CountedAllocator, memory: MemoryReturn) -> None:
    for turn in range(10):
        allocator.resident += 100 * MIB
        memory.check(turn * INTERVAL_S)
    assert allocator.trims == 0


BUFFERS_FREED = """
from headwater.engine.freed_memory import INTERVAL_S, memory_return
from headwater.operating_system import SYSTEM

# Buffers too small for separate mappings of the C library, with one still in use after all of them.
buffers = [bytearray(100_000) for _ in range(1500)]
kept = bytearray(100_000)
filled = SYSTEM.resident_bytes()
memory = memory_return()
memory.check(0.0)
in_use = SYSTEM.resident_bytes()
buffers.clear()
memory.check(INTERVAL_S)
print(filled - in_use, filled - SYSTEM.resident_bytes())
"""


def test_the_c_library_returns_what_python_freed() -> None:
    # A separate process: this one may have freed memory of other tests to return.
    done = subprocess.run([sys.executable, "-c", BUFFERS_FREED], capture_output=True, text=True, check=True)
    returned_in_use, returned_freed = map(int, done.stdout.split())
    assert returned_in_use < 20 * MIB, "nothing is free yet"
    assert returned_freed > 100 * MIB
