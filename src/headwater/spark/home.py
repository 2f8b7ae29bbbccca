"""A Spark home whose Python processes start quickly.

Spark puts `pyspark.zip` first on the path of every Python process that it starts. Python does not cache the compiled
modules of an archive, so each process compiles them again: more than a second of CPU time, where the installed package
takes a third of a second. On a busy machine that decides whether a process starts within Spark's limit of ten seconds.
The home made here has links to the programs and jars of the installed PySpark, and no archive, so the processes import
the installed package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
from pathlib import Path
from typing import Final

log = logging.getLogger("headwater.spark")

_LINKED: Final = ("bin", "jars", "sbin", "RELEASE")


def use_quick_home(master: str) -> None:
    """Use such a home for a Spark that this process starts on this machine, unless SPARK_HOME is set.

    Do nothing on a cluster, whose nodes have their own homes, or if the directory cannot be created.
    """
    is_local = not master or master.startswith("local")
    if not is_local or "SPARK_HOME" in os.environ or "PYSPARK_GATEWAY_PORT" in os.environ:
        return
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        return
    installed = Path(found.origin).parent
    try:
        os.environ["SPARK_HOME"] = str(_linked_home(installed))
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home directory.
        log.debug("Spark starts from %s: %s", installed, error)


def _linked_home(installed: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "headwater" / f"spark-{hashlib.sha256(str(installed).encode()).hexdigest()[:16]}"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in _LINKED:
        link, target = home / name, installed / name
        if target.exists() and not link.exists():
            link.unlink(missing_ok=True)
            try:
                link.symlink_to(target)
            except FileExistsError:
                continue  # Another process was faster.
    return home
