"""Options for a JVM that starts quickly: an archive of its classes, and compiling less at the start.

The JVM parses and verifies about twenty thousand classes at each start. With an archive of them (class data sharing) it
maps a file instead. The archive is written when the first JVM that was started for it ends, beside the links of the
Spark home, about 200 MB; later JVMs use it. Invariant: only a complete archive gets the name that JVMs use, and a JVM
that cannot use it starts without it.

The JVM compiles what runs often twice: quickly, and later with an optimizing compiler, which takes half of the CPU time
of a start. Here code must run three times as often as usual before it is optimized: more would start faster, but then a
query with few events would be slow for longer.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

log = logging.getLogger("headwater.spark")

JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_QUIET: Final = "-Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
_LATE_OPTIMIZING: Final = (
    "-XX:Tier4InvocationThreshold=15000 -XX:Tier4MinInvocationThreshold=1800"
    " -XX:Tier4CompileThreshold=45000 -XX:Tier4BackEdgeThreshold=120000"
)
"""Three times the JVM's defaults."""
_WRITE_LIMIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class ClassArchive:
    """The archive for the installed Java and the jars of a Spark home."""

    path: Path
    draft: Path
    """Where the JVM of this process writes it."""

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def java_options(self, *, writes: bool = False) -> str:
        """What to start the JVM with. Without an archive it starts slowly, and with `writes` it writes one when it
        ends."""
        if self.exists:
            return f"-XX:SharedArchiveFile={self.path} {_QUIET} {_LATE_OPTIMIZING}"
        return f"-XX:ArchiveClassesAtExit={self.draft} {_QUIET} {_LATE_OPTIMIZING}" if writes else _LATE_OPTIMIZING

    def install(self, jvm: subprocess.Popen[bytes]) -> None:
        """Wait for a JVM that is ending and writes the archive, and give the archive its name."""
        try:
            jvm.wait(_WRITE_LIMIT_S)
            if jvm.returncode == 0 and self.draft.exists():
                self.draft.replace(self.path)
                log.info("the next start of Spark is faster: its classes are in %s", self.path)
        except (subprocess.TimeoutExpired, OSError) as error:
            log.debug("no archive of classes: %s", error)
        finally:
            self.draft.unlink(missing_ok=True)


def class_archive(home: Path) -> ClassArchive | None:
    """The archive of a Spark home; None if the JVM cannot have one.

    Java archives no classes if a directory with files is in the class path, and Spark's configuration directory is.
    """
    java = _java()
    configuration = Path(os.environ.get("SPARK_CONF_DIR") or home / "conf")
    if java is None or (configuration.is_dir() and any(configuration.iterdir())):
        return None
    jars = home / "jars"
    try:
        state = [str(java), java.stat().st_mtime_ns, str(jars.resolve()), jars.stat().st_mtime_ns]
    except OSError:
        return None
    name = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    return ClassArchive(home / f"classes-{name}.jsa", home / f"classes-{name}-{os.getpid()}.draft")


def _java() -> Path | None:
    """The `java` that Spark starts."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home, "bin", "java")) if home else shutil.which("java")
    return Path(found).resolve() if found else None
