"""Build hook: compile the optional parts of the package, if this machine can.

    HEADWATER_BUILD=auto       compile if there are Cython, a C compiler and Python's headers (default)
    HEADWATER_BUILD=pure       do not compile; an editable installation loses what was compiled before
    HEADWATER_BUILD=compiled   fail if it cannot be compiled

A wheel with compiled parts is for one platform and version of Python; a pure one is for all.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARTS = ("src/headwater/native/json_scan.pyx",)
FLAGS = ("-O3", "-fPIC", "-fwrapv", "-DNDEBUG", "-w")


class CompiledParts(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        choice = os.environ.get("HEADWATER_BUILD", "auto")
        if choice not in ("auto", "pure", "compiled"):
            raise ValueError(f"HEADWATER_BUILD is {choice!r}; use auto, pure or compiled.")
        sources = [Path(self.root, part) for part in PARTS]
        for source in sources:
            target(source).unlink(missing_ok=True)
        if choice == "pure":
            return
        try:
            for source in sources:
                compile_part(source, target(source))
        except Exception as error:
            for source in sources:
                target(source).unlink(missing_ok=True)
            if choice == "compiled":
                raise
            self.app.display_debug(f"built in pure Python: {error}")
            return
        if version != "editable":
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            for source in sources:
                place = target(source)
                build_data["force_include"][str(place)] = str(place.relative_to(Path(self.root, "src")))


def target(source: Path) -> Path:
    return source.with_name(source.stem + sysconfig.get_config_var("EXT_SUFFIX"))


def compile_part(source: Path, place: Path) -> None:
    if sys.byteorder != "little":
        raise RuntimeError("the compiled parts need a little-endian machine")
    with tempfile.TemporaryDirectory() as directory:
        generated = Path(directory, source.stem + ".c")
        built = Path(directory, place.name)
        _run([sys.executable, "-m", "cython", "-3", "--output-file", str(generated), str(source)])
        link = shlex.split(sysconfig.get_config_var("LDSHARED"))
        include = sysconfig.get_path("include")
        _run([*link, *FLAGS, f"-I{include}", str(generated), "-o", str(built)])
        # Renamed into its place, because a running server may have the previous file mapped.
        temporary = place.with_suffix(".tmp")
        temporary.write_bytes(built.read_bytes())
        temporary.chmod(0o755)
        temporary.replace(place)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")
