"""`--resume FILE`: store the offset of a reader, so that the next run continues there.

Invariant: the file is complete or absent, and its offset is never beyond what was printed. After a crash the last batch
may be read again; nothing is skipped.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from headwater.cli.errors import USAGE, CommandError


class ResumeFile:
    def __init__(self, path: Path, url: str) -> None:
        self._path = path
        self._url = url

    def offset(self) -> str | None:
        """The saved offset, or None if there is no file yet."""
        try:
            saved = json.loads(self._path.read_text(encoding="utf-8"))
            url, offset = saved["url"], saved["offset"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            raise CommandError(
                f"--resume: {self._path} was not written by this command; name another file", USAGE
            ) from None
        if url != self._url:
            raise CommandError(f"--resume: {self._path} belongs to {url}, not to {self._url}", USAGE)
        return str(offset)

    def save(self, offset: str) -> None:
        beside = self._path.with_name(f"{self._path.name}.new")
        try:
            beside.write_text(json.dumps({"url": self._url, "offset": offset}) + "\n", encoding="utf-8")
            os.replace(beside, self._path)  # noqa: PTH105 - a rename that replaces, on every system
        except OSError as error:
            raise CommandError(f"--resume: cannot write {self._path}: {error.strerror}") from None
