"""The build hook: compiled parts where a machine can build them, pure Python everywhere else, without an error."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from headwater.core import native

REPOSITORY = Path(__file__).resolve().parent.parent
DIRECTORY = "src/headwater/core/native"
PARTS = ("json_scan", "plain_append")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with the parts that are compiled."""
    (tmp_path / DIRECTORY).mkdir(parents=True)
    for part in PARTS:
        shutil.copy(REPOSITORY / DIRECTORY / f"{part}.pyx", tmp_path / DIRECTORY)
    return tmp_path


def build(tree: Path, monkeypatch: pytest.MonkeyPatch, choice: str, version: str = "standard") -> dict[str, Any]:
    monkeypatch.syspath_prepend(REPOSITORY)
    monkeypatch.setenv("HEADWATER_BUILD", choice)
    import hatch_build
    from hatchling.bridge.app import Application

    absent: Any = None
    data: dict[str, Any] = {"pure_python": True, "force_include": {}}
    hook = hatch_build.CompiledParts(str(tree), {}, absent, absent, str(tree), "wheel", Application())
    hook.initialize(version, data)
    data["built"] = [Path(path).stat().st_size > 0 for path in data["force_include"]]
    hook.finalize(version, data, "")
    return data


def built_in(tree: Path) -> list[Path]:
    return list(tree.rglob("*" + sysconfig.get_config_var("EXT_SUFFIX")))


@pytest.mark.parametrize("missing", ["compiler", "cython"])
def test_a_machine_that_cannot_compile_gets_pure_python(
    tree: Path, missing: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if missing == "cython":
        monkeypatch.setattr(sys, "executable", "/bin/false")
    else:
        known = sysconfig.get_config_var
        monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "false" if name == "LDSHARED" else known(name))
    for version in ("standard", "editable"):
        data = build(tree, monkeypatch, "auto", version)
        assert data == {"pure_python": True, "force_include": {}, "built": []}
        assert built_in(tree) == []
    assert capfd.readouterr() == ("", "")
    with pytest.raises(RuntimeError, match="failed"):
        build(tree, monkeypatch, "compiled")


def test_pure_build_removes_what_was_compiled_before(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [tree / DIRECTORY / (part + sysconfig.get_config_var("EXT_SUFFIX")) for part in PARTS]
    for path in before:
        path.write_bytes(b"")
    assert build(tree, monkeypatch, "pure", "editable")["pure_python"]
    assert not any(path.exists() for path in before)


@pytest.mark.skipif(native.BUILD == "pure", reason="this environment was built without a compiler")
def test_wheel_with_compiled_parts_is_for_one_platform(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = build(tree, monkeypatch, "compiled")
    assert (data["pure_python"], data["infer_tag"], data["built"]) == (False, True, [True, True])
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert list(data["force_include"].values()) == [f"headwater/core/native/{part}{suffix}" for part in PARTS]
    # The tree may be an editable installation in use.
    assert built_in(tree) == []


def test_unknown_choice_is_an_error(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="use auto, pure or compiled"):
        build(tree, monkeypatch, "fast")
