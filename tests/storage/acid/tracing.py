"""Record a process's writes and syncs with strace, and rebuild the disk that a power cut would leave.

A write counts as issued when its call begins. It is durable once a sync of its file that began after the write had
ended has itself ended, or, on a descriptor opened with O_DSYNC, once the call has ended. At a cut, whatever was issued
and is not durable is decided for every 512-byte sector: kept, dropped, zeroed or garbled. The two meta pages of LMDB
are written within one sector each, which disks write whole or not at all: kept or dropped.

Creating, renaming and removing a file is durable once its directory was synced in the same sense. Of what was not, the
disk has some first part, in order, as a file system with a journal does.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SECTOR = 512
META_BYTES = 8192
CALLS = "openat,close,pwrite64,pwritev,write,writev,lseek,fdatasync,fsync,msync,ftruncate,rename,unlink"

_LINE = re.compile(r"(\d+) +(?:(\w+)\(|<\.\.\. (\w+) resumed>)(.*)")
_INTERRUPTED = re.compile(r" *<(?:unfinished|detached) \.\.\.>$")
_RESULT = re.compile(r"\) += .*$")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@dataclass
class Write:
    inode: str
    offset: int
    data: bytes
    dsync: bool
    began: int
    ended: int = 2**62


@dataclass
class Sync:
    inode: str
    began: int
    ended: int = 2**62


@dataclass
class Named:
    """A file gets a name, or loses it if there is no file."""

    path: str
    inode: str | None
    began: int
    ended: int = 2**62


@dataclass
class Trace:
    """The events of a trace. `inode` identifies a file: its path, and how many files had that path before."""

    writes: list[Write] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    names: list[Named] = field(default_factory=list)
    said: list[tuple[int, str]] = field(default_factory=list)
    length: int = 0


def record(command: list[str], trace: Path, **options: object) -> None:
    """Run a command under strace."""
    if shutil.which("strace") is None:
        pytest.fail("strace is needed to see what reaches the kernel; install it (apt-get install strace)")
    subprocess.run(
        ["strace", "-f", "-qq", "-xx", "-s", "10000000", "-e", f"trace={CALLS}", "-o", str(trace), *command],
        check=True,
        timeout=120,
        **options,  # type: ignore[call-overload]
    )


def read_trace(path: Path) -> Trace:
    """Parse the writes, syncs and printed lines of a trace; the line number is the time."""
    trace = Trace()
    reader = _Reader(trace)
    with path.open() as lines:
        for number, line in enumerate(lines):
            match = _LINE.match(line)
            if match is None:
                continue
            thread, begun, resumed, rest = match.groups()
            reader.line(number, thread, begun, resumed, rest)
            trace.length = number
    return trace


class _Reader:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._files: dict[int, tuple[str, bool]] = {}
        self._offsets: dict[int, int] = {}
        self._unfinished: dict[str, tuple[str, str]] = {}
        self._open: dict[str, list[Write | Sync | Named]] = {}
        self._inodes: dict[str, str] = {}
        self._created = 0
        self._short: dict[str, str] = {}

    def line(self, number: int, thread: str, begun: str | None, resumed: str | None, rest: str) -> None:
        assert thread not in self._short, self._short[thread]
        if begun is not None:
            text = _INTERRUPTED.sub("", rest)
            self._begin(number, thread, begun, text)
            if text != rest:
                self._unfinished[thread] = (begun, text)
                return
            call = begun
        else:
            call, head = self._unfinished.pop(thread)
            assert call == resumed
            text = head + rest
        self._end(number, thread, call, text)

    def _begin(self, number: int, thread: str, call: str, text: str) -> None:
        if call in {"pwrite64", "pwritev", "write", "writev"}:
            descriptor = int(text.split(",", 1)[0])
            data = b"".join(bytes.fromhex(part.replace("\\x", "")) for part in _STRING.findall(text))
            if descriptor == 1:
                self._trace.said += [(number, line) for line in data.decode().splitlines()]
                return
            path, dsync = self._files.get(descriptor, ("", False))
            if call.startswith("p"):
                offset = int(_RESULT.sub("", text).rsplit(",", 1)[1])
            else:
                offset = self._offsets.get(descriptor, 0)
                self._offsets[descriptor] = offset + len(data)
            write = Write(path, offset, data, dsync, number)
            self._trace.writes.append(write)
            self._open[thread] = [write]
        elif call in {"fdatasync", "fsync"}:
            path, _ = self._files.get(int(re.split(r"[ )]", text, maxsplit=1)[0]), ("", False))
            sync = Sync(path, number)
            self._trace.syncs.append(sync)
            self._open[thread] = [sync]
        elif call in {"rename", "unlink"}:
            path, *target = _paths(text)
            named = [Named(path, None, number)]
            if target:
                named.append(Named(target[0], self._inodes.get(path, path), number))
            self._trace.names += named
            self._open[thread] = [*named]
        elif call in {"msync", "ftruncate"}:
            path, _ = self._files.get(int(re.split(r"[,)]", text, maxsplit=1)[0], 0), ("", False))
            assert not path.endswith("data.mdb"), f"{call} is not expected from LMDB with these options"

    def _end(self, number: int, thread: str, call: str, text: str) -> None:
        finished = self._open.pop(thread, [])
        result = text.rsplit("=", 1)[1].split(maxsplit=1)[0]
        if result == "?":
            return  # The process ended within the call, so the call never completed.
        for done in finished:
            if isinstance(done, Write) and int(result) != len(done.data):
                # strace may print registers for a thread that ends within a call; one that continues had a real error.
                self._short[thread] = f"a short write: {result} of {len(done.data)}"
                return
            if isinstance(done, Named) and int(result) != 0:
                self._trace.names.remove(done)
                continue
            done.ended = number
            if isinstance(done, Named):
                self._inodes[done.path] = done.inode or done.path
        if call == "openat" and int(result, 0) >= 0:
            [path] = _paths(text)
            if "O_EXCL" in text:
                self._created += 1
                self._inodes[path] = f"{path}#{self._created}"
                self._trace.names.append(Named(path, self._inodes[path], number, number))
            self._files[int(result)] = (self._inodes.get(path, path), "O_DSYNC" in text)
            self._offsets[int(result)] = 0
        elif call == "lseek":
            self._offsets[int(text.split(",", 1)[0])] = int(result)


def cut(trace: Trace, at: int, before: Path, used: Path, after: Path, dice: random.Random) -> None:
    """Write to `after` what a power cut at a moment of the trace may leave of `used`, which started as `before`."""
    names: dict[str, str] = {}
    contents: dict[str, bytearray] = {}
    for path in before.rglob("*"):
        if path.is_file() and path.name not in {"LOCK", "lock.mdb"}:
            inode = str(used / path.relative_to(before))
            names[inode] = inode
            contents[inode] = bytearray(path.read_bytes())
    last_sync: dict[str, int] = {}
    for sync in trace.syncs:
        if sync.ended < at:
            last_sync[sync.inode] = max(last_sync.get(sync.inode, -1), sync.began)
    for write in trace.writes:
        if not write.inode.startswith(str(used)) or write.began >= at:
            continue
        content = contents.setdefault(write.inode, bytearray())
        content.extend(bytes(max(0, write.offset + len(write.data) - len(content))))
        if write.ended < at if write.dsync else write.ended < last_sync.get(write.inode, -1):
            content[write.offset : write.offset + len(write.data)] = write.data
        else:
            _scatter(content, write, dice)
    _name(trace, at, used, names, last_sync, dice)
    for name, inode in names.items():
        path = after / Path(name).relative_to(used)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents.get(inode, b""))


def _name(
    trace: Trace, at: int, used: Path, names: dict[str, str], last_sync: dict[str, int], dice: random.Random
) -> None:
    """Apply the names that a power cut may leave: all durable ones, and a random prefix of the others."""
    by_directory: dict[str, list[Named]] = {}
    for named in trace.names:
        if named.path.startswith(str(used)) and named.began < at:
            by_directory.setdefault(str(Path(named.path).parent), []).append(named)
    for directory, changes in by_directory.items():
        durable = sum(change.ended < last_sync.get(directory, -1) for change in changes)
        kept = changes[: dice.randint(durable, len(changes))]
        if kept and len(kept) < len(changes) and kept[-1].began == changes[len(kept)].began:
            # A rename takes effect as a whole.
            kept.append(changes[len(kept)])
        for change in kept:
            if change.inode is None:
                names.pop(change.path, None)
            elif Path(change.path).name not in {"LOCK", "lock.mdb"}:
                names[change.path] = change.inode


def _paths(text: str) -> list[str]:
    return [bytes.fromhex(found.replace("\\x", "")).decode() for found in _STRING.findall(text)]


def _scatter(content: bytearray, write: Write, dice: random.Random) -> None:
    at = write.offset
    end = write.offset + len(write.data)
    while at < end:
        until = min(end, (at // SECTOR + 1) * SECTOR)
        is_meta = at < META_BYTES and write.inode.endswith("data.mdb")
        fate = dice.choice(["kept", "dropped"] if is_meta else ["kept", "kept", "dropped", "zeroed", "garbled"])
        if fate == "kept":
            content[at:until] = write.data[at - write.offset : until - write.offset]
        elif fate == "zeroed":
            content[at:until] = bytes(until - at)
        elif fate == "garbled":
            content[at:until] = dice.randbytes(until - at)
        at = until
