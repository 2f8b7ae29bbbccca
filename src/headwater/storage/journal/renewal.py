"""Replace a file by a fresh copy of its sound part, because its end may exist only in the page cache.

When a sync fails, Linux marks the pages as clean: a later read returns them, a later sync succeeds without writing
them, and a power cut loses them. So what a start has read back from the end of a file is not known to be on the disk,
however often the file is synced. Written to a new file and synced there, it is. A crash at any point leaves the old
file or the new one, which hold the same.
"""

from __future__ import annotations

import errno
import logging
from contextlib import suppress
from pathlib import Path
from typing import Final

from headwater.storage.directory import write_file
from headwater.storage.filesystem import Filesystem

log = logging.getLogger("headwater.storage")

SUFFIX: Final = ".new"
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def renew(filesystem: Filesystem, path: Path, size: int) -> None:
    """Replace a file by a copy of its first `size` bytes; the copy and its name are durable when this returns.

    On a full disk the file is cut and synced in place instead: a start must be possible, to make room.
    """
    fresh = path.with_name(path.name + SUFFIX)
    if filesystem.exists(fresh):
        filesystem.unlink(fresh)
    try:
        write_file(filesystem, fresh, filesystem.read(path)[:size])
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        log.warning("%s is not rewritten, because the disk is full", path)
        with suppress(OSError):
            filesystem.unlink(fresh)
        filesystem.truncate(path, size)
        filesystem.sync_directory(path.parent)
        return
    filesystem.replace(fresh, path)
    filesystem.sync_directory(path.parent)
