"""Rules of the source tree that no single module can check: no import cycles, one meaning for each class name, one
convention for exceptions, errors that say what to do, decoders that are made at import, positions with a unit, and
tests that do not sleep."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

import headwater
from headwater.cli.errors import CommandError
from headwater.core.errors import Refusal
from headwater.storage.interface import CorruptError, StorageError
from headwater.storage.tiering.block_cache import NotLocalError
from headwater.storage.tiering.standby_store import OutdatedError

SOURCE = Path(__file__).resolve().parents[1] / "src" / "headwater"


def cycle_in(imports: dict[str, set[str]]) -> list[str]:
    """The modules of one import cycle, or none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_through_others() -> None:
    """Also for imports that only type checkers see: two modules that need each other are one module."""
    graph = grimp.build_graph("headwater", exclude_type_checking_imports=False)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200
    assert cycle_in({module: found & imports.keys() for module, found in imports.items()}) == []


def test_cycle_is_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def class_names() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(SOURCE)))
    return found


def test_class_name_is_used_once() -> None:
    names = class_names()
    assert len(names) > 100
    assert {name: paths for name, paths in names.items() if len(paths) > 1} == {}


def exceptions() -> list[type[BaseException]]:
    """The exception classes that the package defines."""
    for module in pkgutil.walk_packages(headwater.__path__, "headwater."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, waiting = [], [BaseException]
    while waiting:
        for one in waiting.pop().__subclasses__():
            waiting.append(one)
            if one.__module__.startswith("headwater"):
                found.append(one)
    return found


def test_exceptions_are_named_by_one_convention() -> None:
    """`…Error` is raised to callers; a refusal is named after the error code of the protocol."""
    found = exceptions()
    assert len(found) > 100
    assert [one.__name__ for one in found if not issubclass(one, Refusal) and not one.__name__.endswith("Error")] == []


def test_refusals_are_named_after_their_error_code() -> None:
    """Those that only narrow another refusal inherit its code."""
    named = {one.__name__: one.code for one in exceptions() if issubclass(one, Refusal) and "code" in vars(one)}
    assert len(named) > 40
    other = {name: code for name, code in named.items() if words(name) != code.lower()}
    # The documents use these two codes for more than one cause, and the bases have the code of their general case.
    assert other.keys() <= {"InvalidAck", "InvalidSubscription", "Refusal", "SubscriptionRefusal"}


REMEDY = re.compile(r";|\. [A-Z]|, not |\bmust\b")
"""A second part after what is wrong: what to do, or the value that was expected instead of the one received."""


def texts_of_refusals() -> dict[str, str]:
    """The text of each refusal that the source writes out, by its place."""
    names = {one.__name__ for one in exceptions() if issubclass(one, Refusal)}
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names and node.args:
                text = node.args[0]
                written = [one.value for one in ast.walk(text) if isinstance(one, ast.Constant)]
                if isinstance(text, ast.Constant | ast.JoinedStr):
                    found[f"{path.relative_to(SOURCE)}:{node.lineno}"] = "".join(map(str, written))
    return found


def test_refusals_say_what_to_do() -> None:
    found = texts_of_refusals()
    assert len(found) > 200
    assert {place: text for place, text in found.items() if not REMEDY.search(text)} == {}


REMEDY_OF_COMMAND = re.compile(
    REMEDY.pattern
    + r"|: (join|list|set|use)\b|\(--|\b(as in|with --)|^([Gg]ive|name) "
    + r"|\b(needs|only|at most|pip install|cannot be combined)\b"
    + r"|\{advice\}$"
)
"""In a usage error the option that is missing or excessive is enough. A function named `…_advice` returns a remedy."""

CAUSE = re.compile(r": \{\}\.?$|^\{\}: \{\}$")
"""The text ends with the error of another program or library."""

WITHOUT_REMEDY = {
    "{}: {} finding{}",  # The findings are printed before it.
    "nothing was deleted",  # The user did not confirm.
    "Shard {} was taken over by another node.",  # The other node serves it; this process ends.
    # Defects of the copy: the original is unchanged.
    "The copy differs from the original in the states of streams or documents.",
    "The copy of stream {} differs from the original.",
}


def texts_of_failures() -> dict[str, str]:
    """The text of each error of a command, or of storage, that the source writes out, with `{}` for values, and the
    texts that functions named `…_advice` return.

    Findings about damaged data are not in it, nor are errors that only the program itself sees.
    """
    names = {one.__name__ for one in exceptions() if issubclass(one, CommandError | StorageError)}
    names -= {one.__name__ for one in exceptions() if issubclass(one, CorruptError | NotLocalError | OutdatedError)}
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            texts: list[ast.AST | None] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                texts = list(node.args[:1])
            elif isinstance(node, ast.FunctionDef) and node.name.endswith("_advice"):
                texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Return)]
            for text in texts:
                if isinstance(text, ast.Constant | ast.JoinedStr):
                    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                    found[f"{path.relative_to(SOURCE)}:{text.lineno}"] = "".join(map(part_of_text, parts))
    return found


def part_of_text(part: ast.AST) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Call):
        return "{advice}" if ast.unparse(part.value.func).endswith("_advice") else "{}"
    return "{}"


def test_errors_of_commands_and_storage_say_what_to_do_or_their_cause() -> None:
    found = texts_of_failures()
    assert len(found) > 150
    assert set(found.values()) >= WITHOUT_REMEDY, "the list has no text that the source does not"
    unclear = {place: text for place, text in found.items() if text not in WITHOUT_REMEDY and not CAUSE.search(text)}
    assert {place: text for place, text in unclear.items() if not REMEDY_OF_COMMAND.search(text)} == {}


def words(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


SAFE_TYPES = frozenset(("str", "msgspec.Raw"))


def late_decoders(tree: ast.AST) -> list[int]:
    """The lines that decode into a type of ours without a decoder that was made at import."""
    nodes = list(ast.walk(tree))
    calls = [
        (node, node.func.attr) for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    decoded = [
        node.lineno
        for node, name in calls
        if name == "decode"
        and any(word.arg == "type" and ast.unparse(word.value) not in SAFE_TYPES for word in node.keywords)
    ]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    made = [
        node.lineno
        for node, name in calls
        if name == "Decoder" and any(f.lineno < node.lineno <= (f.end_lineno or 0) for f in functions)
    ]
    return decoded + made


def test_decoders_are_made_at_import() -> None:
    """A process crashes when two threads use a type for the first time: one sees the description of its fields that the
    other is still filling. At import, there is only one."""
    found = {
        str(path.relative_to(SOURCE)): lines
        for path in SOURCE.rglob("*.py")
        if (lines := late_decoders(ast.parse(path.read_text())))
    }
    assert found == {}


def test_late_decoder_is_found() -> None:
    assert late_decoders(ast.parse("msgspec.json.decode(body, type=Answer)")) == [1]
    assert late_decoders(ast.parse("def read(body):\n    return msgspec.json.Decoder(Answer).decode(body)")) == [2]
    assert late_decoders(ast.parse("answers = msgspec.json.Decoder(Answer)")) == []


SERVER_PACKAGES = ("core", "storage", "engine", "cluster", "http")

PLAIN_POSITIONS = {"core/native/__init__.py": "the parameters are those of the compiled function"}
"""The modules in which `position` has another meaning, or another reason."""


def names_in(tree: ast.AST) -> list[tuple[int, str]]:
    """The parameters, attributes, variables and functions of a module, by line."""
    found = []
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                found.append((getattr(node, "lineno", 0), name))
    return found


def unnamed_units(tree: ast.AST) -> list[int]:
    """The lines that say `position` without its unit, or `index` beside a byte position."""
    found = [line for line, name in names_in(tree) if name.lstrip("_") == "position"]
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments | ast.Tuple):
            parts = [*node.posonlyargs, *node.args, *node.kwonlyargs] if isinstance(node, ast.arguments) else node.elts
            names = {name.lstrip("_") for part in parts for _, name in names_in(part)}
            if {"byte_position", "index"} <= names:
                found.append(parts[0].lineno)
    return found


def test_positions_in_the_server_have_a_unit() -> None:
    """`message_index` counts messages, and `byte_position` stored bytes; after a prefix such as `durable_` or `end_`,
    `_index` and `_position` mean the same. To clients a position is a number of messages."""
    paths = [path for package in SERVER_PACKAGES for path in sorted((SOURCE / package).rglob("*.py"))]
    assert len(paths) > 100
    found = {str(path.relative_to(SOURCE)): unnamed_units(ast.parse(path.read_text())) for path in paths}
    assert {path for path, lines in found.items() if lines} == PLAIN_POSITIONS.keys(), found


def test_position_without_unit_is_found() -> None:
    assert unnamed_units(ast.parse("position = 1")) == [1]
    assert unnamed_units(ast.parse("class Tail:\n    def __init__(self):\n        self._position = 0")) == [3]
    assert unnamed_units(ast.parse("def read(stream_id: int, position: int): ...")) == [1]
    assert unnamed_units(ast.parse("read(position=2)")) == [1]
    assert unnamed_units(ast.parse("def cut(index, byte_position): ...")) == [1]
    assert unnamed_units(ast.parse("cut = run.index, run.byte_position")) == [1]
    assert unnamed_units(ast.parse("end_index, end_position = cut(message_index, byte_position)")) == []


MAY_SLEEP = {
    "the helper, in which other tests wait": ("waiting",),
    "polls itself, with its own limit or in a coroutine": (
        "ai.test_durable_response",
        "cluster.links",
        "crash.small_disk",
        "kills.drivers",
        "pressure.stalls",
        "shapes.many_readers",
        "spark.connect_job",
    ),
    "load: clients and faults at random times, or in a rhythm": (
        "client.test_round_trip",
        "cluster.nodes.faults",
        "cluster.nodes.tables",
        "cluster.test_links",
        "crash.killable_server",
        "crash.stream_clients",
        "crash.stream_lifecycles",
        "crash.subscription_workload",
        "crash.test_kill_nine",
        "crash.workload",
        "docs.pictures",
        "http.test_subscription_restarts",
        "kills.services",
        "kills.trial",
        "pressure.clients",
        "pressure.disruptions",
        "pressure.fuzz",
        "pressure.operations",
        "pressure.soak",
        "spark.test_cluster",
        "storage.acid.test_kill",
    ),
    "retry: a client pauses after a failed request": (
        "cluster.nodes.test_cluster",
        "http.test_cold_reads",
        "kills.feeding",
        "pressure.load",
        "shapes.serving",
        "stack.test_up",
    ),
    "delay: slow on purpose, because that is what is tested": (
        "ai.test_mcp",
        "cluster.test_supervisor",
        "crash.faults",
        "engine.test_loop_lag",
        "http.test_large_bodies",
        "pressure.faults",
        "spark.copy_job",
        "storage.acid.crash_child",
        "storage.slow_start",
        "test_telemetry",
    ),
    "measurement: the use of a resource over a time": ("conftest", "pressure.many_connections", "pressure.probe"),
}
"""The test modules that sleep, by reason. All others wait for an event with `tests.waiting`, or move the clock."""


def sleeps(tree: ast.AST) -> list[int]:
    """The lines that sleep for a time. A sleep of 0 only lets the event loop continue."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == "sleep"]
    return [call.lineno for call in found if [ast.unparse(delay) for delay in call.args] != ["0"]]


def test_only_known_tests_sleep() -> None:
    tests = Path(__file__).parent
    found = {
        ".".join(path.relative_to(tests).with_suffix("").parts): lines
        for path in tests.rglob("*.py")
        if "node_modules" not in path.parts and (lines := sleeps(ast.parse(path.read_text())))
    }
    known = [module for modules in MAY_SLEEP.values() for module in modules]
    assert len(known) == len(set(known))
    assert found.keys() == set(known), found


def test_sleep_is_found() -> None:
    assert sleeps(ast.parse("time.sleep(0.1)")) == [1]
    assert sleeps(ast.parse("async def test():\n    await asyncio.sleep(every_s)")) == [2]
    assert sleeps(ast.parse("sleep(secs=1)")) == [1]
    assert sleeps(ast.parse("asyncio.sleep(0)\ntime.monotonic()")) == []
