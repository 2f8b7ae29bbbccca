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

PACKAGE = "src/headwater/core/native"
PARTS = ("json_scan.pyx", "plain_append.pyx")
FLAGS = ("-O3", "-fPIC", "-fwrapv", "-DNDEBUG", "-w")


class CompiledParts(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"
    _temporary: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        choice = os.environ.get("HEADWATER_BUILD", "auto")
        if choice not in ("auto", "pure", "compiled"):
            raise ValueError(f"HEADWATER_BUILD is {choice!r}; use auto, pure or compiled.")
        if version == "editable":
            built = Path(self.root, PACKAGE)
        else:
            # Not into the tree, which may be an editable installation in use.
            self._temporary = tempfile.TemporaryDirectory()
            built = Path(self._temporary.name)
        try:
            if choice == "pure":
                raise RuntimeError("HEADWATER_BUILD is pure")
            compiled = [compile_part(Path(self.root, PACKAGE, name), built) for name in PARTS]
        except Exception as error:
            if choice == "compiled":
                self._clean_up()
                raise
            self.app.display_debug(f"built in pure Python: {error}")
            for name in PARTS:
                compiled_path(built, name).unlink(missing_ok=True)
            return
        if version != "editable":
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            for part in compiled:
                build_data["force_include"][str(part)] = f"{PACKAGE.removeprefix('src/')}/{part.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._clean_up()

    def _clean_up(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


def compiled_path(directory: Path, name: str) -> Path:
    return directory / f"{Path(name).stem}{sysconfig.get_config_var('EXT_SUFFIX')}"


def compile_part(source: Path, directory: Path) -> Path:
    """Compile a source file into an extension module in this directory; returns its path."""
    if sys.byteorder != "little":
        raise RuntimeError("the compiled parts need a little-endian machine")
    place = compiled_path(directory, source.name)
    with tempfile.TemporaryDirectory() as temporary:
        generated = Path(temporary, source.stem + ".c")
        built = Path(temporary, place.name)
        _run([sys.executable, "-m", "cython", "-3", "--output-file", str(generated), str(source)])
        link = shlex.split(sysconfig.get_config_var("LDSHARED"))
        _run([*link, *FLAGS, f"-I{sysconfig.get_path('include')}", str(generated), "-o", str(built)])
        # Renamed into its place, because a running server may have the previous file mapped.
        complete = place.with_suffix(".tmp")
        complete.write_bytes(built.read_bytes())
        complete.chmod(0o755)
        return complete.replace(place)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")
