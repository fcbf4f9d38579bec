"""Dependencies point one way: the ranks of the rooms in docs/project/design.md, enforced by
reading the imports.

A module may import modules of its own room and of rooms of lower rank: no neighbour of the same
rank, nothing upwards, and never in a circle. Imports inside functions and under TYPE_CHECKING
count: they are knowledge too. Nothing is imported to find out, so this runs without a build.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

PACKAGE = "fastckpt"

# Rooms by rank, lowest first: folders, and modules that lie flat beside them.
RANKS: list[set[str]] = [
    {"errors"},
    {"plan", "arguments", "latch"},
    {"formats", "storage", "ranks"},
    {"engine", "state"},
    {"saving", "reading"},
    {"files", "directories"},
    {"steps"},
    {"tiers", "lazy"},
    {"api"},
    {"integrations"},
    {"cli"},
    {"__main__"},
]
RANK_OF = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
# Imports that the rule forbids and that are there yet, as (module, module). None is added.
EXCEPTIONS: set[tuple[str, str]] = set()
# How many pairs of rooms there are of which one imports the other. This only ever gets lower: a new
# pair wants another one gone, by a name that moves to its room or by what a caller hands over.
PAIRS_MAX = 119
# Only these speak to the extension module.
ENGINE_USERS = {"engine", "storage", "saving.thread_calls"}
# Only these may go through the public names; to the core, fastckpt/__init__.py is upwards.
PUBLIC_NAME_USERS = {"integrations", "cli", "__main__"}

PYTHON_BINDINGS = {
    "bindings.cc",
    "bindings_gds.cc",
    "bindings_gil.h",
    "bindings_parts.cc",
    "bindings_python_frames.cc",
}
PYTHON_HEADER = re.compile(r"^(pybind11/|Python\.h)")
DEVICE_HEADER = re.compile(
    r"^(torch/|ATen/|c10/|caffe2/|cuda(?!_shim)|cufile(?!_shim)|nvml|thrust/|cub/)"
)


def module_name(path: Path, root: Path) -> str:
    """fastckpt/formats/distcp.py -> formats.distcp; fastckpt/__init__.py -> ''."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def read_package(root: Path) -> dict[str, tuple[ast.Module, bool]]:
    """Every module of the package by name: its syntax tree, and whether it is an __init__.py."""
    return {
        module_name(path, root): (ast.parse(path.read_text("utf-8")), path.stem == "__init__")
        for path in sorted(root.rglob("*.py"))
    }


def absolute_imports(name: str, tree: ast.Module, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted target) of each import; `from a import b` gives a.b, for b may be a module."""
    parts = [PACKAGE, *name.split(".")] if name else [PACKAGE]
    package = parts if is_package else parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package[: len(package) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def imports_in_package(
    name: str, tree: ast.Module, is_package: bool, modules: set[str]
) -> Iterator[tuple[int, str]]:
    """(line, module) of each import of this package: '' for its public names, '_engine' too."""
    for line, target in absolute_imports(name, tree, is_package):
        if target != PACKAGE and not target.startswith(f"{PACKAGE}."):
            continue
        inner = target[len(PACKAGE) + 1 :]
        while inner and inner not in modules and inner != "_engine":
            inner = inner.rpartition(".")[0]
        yield line, inner


def faults(package: dict[str, tuple[ast.Module, bool]]) -> list[str]:
    """Every import that the rule forbids, and every module without a room."""
    found = []
    for name, (tree, is_package) in package.items():
        room = name.partition(".")[0]
        if room and room not in RANK_OF:
            found.append(f"{name}: in no room of {Path(__file__).name}")
            continue
        for line, target in imports_in_package(name, tree, is_package, set(package)):
            fault = _fault(name, room, target)
            if fault and (name, target) not in EXCEPTIONS:
                found.append(f"{name or '__init__'}:{line}: {fault}")
    return found


def _fault(name: str, room: str, target: str) -> str:
    """What is wrong about an import of a module; "" if it may be."""
    target_room = target.partition(".")[0]
    if target == "_engine":
        allowed = {room, name} & ENGINE_USERS
        return "" if allowed else f"only {sorted(ENGINE_USERS)} import {target}"
    if target_room == "":
        is_public = not room or room in PUBLIC_NAME_USERS
        return "" if is_public else "imports the public names, which are above it"
    if target_room not in RANK_OF or target_room == room:
        return ""  # a module without a room is told of by itself
    if room == "":
        above = target_room in PUBLIC_NAME_USERS
        return f"the public names do not include {target_room}" if above else ""
    if RANK_OF[target_room] > RANK_OF[room]:
        return f"imports {target}, which is above it"
    return f"imports {target}, a neighbour" if RANK_OF[target_room] == RANK_OF[room] else ""


def room_pairs(package: dict[str, tuple[ast.Module, bool]]) -> set[tuple[str, str]]:
    """Every (importing, imported) pair of rooms, the public names being one as well."""
    found = set()
    for name, (tree, is_package) in package.items():
        for _line, target in imports_in_package(name, tree, is_package, set(package)):
            found.add((name.partition(".")[0], target.partition(".")[0]))
    return {(a, b) for a, b in found if a != b and b != "_engine"}


def cycles(package: dict[str, tuple[ast.Module, bool]]) -> list[str]:
    """Circles of imports among the modules, by depth-first search; a package's own parts count."""
    modules = set(package)
    edges = {
        name: {
            target
            for _, target in imports_in_package(name, tree, is_package, modules)
            if target in modules and target not in ("", name)
        }
        for name, (tree, is_package) in package.items()
    }
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in sorted(edges[name]):
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(edges):
        visit(name, [])
    return found


def includes(text: str) -> list[str]:
    return re.findall(r"^[ \t]*#[ \t]*include[ \t]*[<\"]([^>\"]+)[>\"]", text, re.MULTILINE)


def header_faults(file_name: str, text: str) -> list[str]:
    found = []
    for header in includes(text):
        if PYTHON_HEADER.match(header) and file_name not in PYTHON_BINDINGS:
            found.append(f"csrc/{file_name}: {header} belongs to {sorted(PYTHON_BINDINGS)} alone")
        if DEVICE_HEADER.match(header):
            found.append(f"csrc/{file_name}: {header}: the core builds without torch and CUDA")
    return found


def scratch(**sources: str) -> dict[str, tuple[ast.Module, bool]]:
    """A package of the given sources; formats__zip stands for formats.zip."""
    texts = {name.replace("__", "."): text for name, text in sources.items()}
    packages = {name.partition(".")[0] for name in texts if "." in name}
    return {name: (ast.parse(text), name in packages) for name, text in texts.items()}


def test_imports_point_one_way() -> None:
    package = read_package(ROOT / PACKAGE)
    assert {"", "errors", "plan.image"} <= set(package)
    assert not faults(package), "\n" + "\n".join(faults(package))


def test_exceptions_are_still_needed() -> None:
    package = read_package(ROOT / PACKAGE)
    there = {
        (name, target)
        for name, (tree, is_package) in package.items()
        for _line, target in imports_in_package(name, tree, is_package, set(package))
    }
    assert there >= EXCEPTIONS


def test_imports_do_not_run_in_circles() -> None:
    assert not cycles(read_package(ROOT / PACKAGE))


def test_no_more_rooms_know_each_other() -> None:
    found = room_pairs(read_package(ROOT / PACKAGE))
    assert {("saving", "engine"), ("cli", "storage")} <= found
    assert len(found) <= PAIRS_MAX, f"{len(found)} pairs:\n{sorted(found)}"
    assert len(found) == PAIRS_MAX, f"there are {len(found)}: lower PAIRS_MAX"


def test_csrc_knows_neither_python_nor_devices() -> None:
    paths = sorted([*(ROOT / "csrc").rglob("*.cc"), *(ROOT / "csrc").rglob("*.h")])
    assert {ROOT / "csrc" / name for name in PYTHON_BINDINGS} <= {*paths}
    found = [fault for path in paths for fault in header_faults(path.name, path.read_text("utf-8"))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "package",
    [
        scratch(errors="", plan="", plan__image="from fastckpt import api", api=""),
        scratch(plan="", plan__image="from ..saving import fence", saving__fence="", saving=""),
        scratch(files="def f():\n    import fastckpt.api", api=""),
        scratch(formats="", formats__zip="from ..engine.staging import Arena", engine__staging=""),
        scratch(formats="", formats__zip="from fastckpt.storage import lustre", storage__lustre=""),
        scratch(saving="from fastckpt import _engine"),
        scratch(saving="import fastckpt._engine as core"),
        scratch(saving="import fastckpt"),
        scratch(saving="from fastckpt import SaveHandle"),
        scratch(**{"": "from fastckpt.cli import main", "cli": ""}),
        scratch(novelty=""),
    ],
)
def test_wrong_direction_is_found(package: dict[str, tuple[ast.Module, bool]]) -> None:
    assert len(faults(package)) == 1


def test_right_direction_passes() -> None:
    package = scratch(
        errors="import os",
        plan="",
        plan__image="from fastckpt.errors import CheckpointError",
        formats="",
        formats__zip="from ..plan.image import Image\nfrom . import records",
        formats__records="",
        storage="",
        storage__file_system="from fastckpt import _engine, errors",
        storage__atomic="from fastckpt.storage.file_system import rename",
        saving="from fastckpt.formats import zip\nfrom fastckpt.storage import atomic",
        cli="import fastckpt\nfrom fastckpt import save",
    )
    assert faults(package) == []
    assert cycles(package) == []


def test_pairs_of_rooms_are_counted_once() -> None:
    package = scratch(
        errors="",
        plan="",
        plan__image="from fastckpt import errors",
        plan__boxes="from fastckpt.plan.image import Image",
        formats="",
        formats__zip="def f():\n    from ..plan import image\n    from ..plan.boxes import Box",
        formats__tar="import fastckpt.plan.image",
        api="from fastckpt.formats import zip",
    )
    assert room_pairs(package) == {("formats", "plan"), ("plan", "errors"), ("api", "formats")}


def test_circle_is_found() -> None:
    package = scratch(
        storage="",
        storage__lustre="from fastckpt.storage import atomic",
        storage__atomic="from . import lustre",
    )
    assert faults(package) == []
    assert cycles(package) == ["storage.atomic -> storage.lustre -> storage.atomic"]


@pytest.mark.parametrize(
    ("file_name", "text"),
    [
        ("engine.cc", "#include <pybind11/pybind11.h>\n"),
        ("engine.h", '#  include "Python.h"\n'),
        ("bindings.cc", "#include <torch/extension.h>\n"),
        ("arena.cc", "#include <cuda_runtime.h>\n"),
        ("gds_sink.cc", "#include <cufile.h>\n"),
    ],
)
def test_wrong_header_is_found(file_name: str, text: str) -> None:
    assert len(header_faults(file_name, text)) == 1
