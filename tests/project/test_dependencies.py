"""Dependencies point one way: the layers of docs/design.md, enforced by reading the imports.

A module may import modules of lower layers and its neighbours in its own, never upwards, and never
in a circle. Imports inside functions and under TYPE_CHECKING count: they are knowledge too. Nothing
is imported to find out, so this runs without a build.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGE = "fastckpt"

# Lowest first. A name stands for the module and, where it is a package, for everything in it.
LAYERS: list[set[str]] = [
    {"errors", "near_names", "quantities"},
    {"arguments", "image", "handle", "latch", "intervals", "rows", "advice"},
    {"formats", "shards", "running_calls"},
    {"fence", "replicas", "placements", "tree", "shard", "session", "store_client"},
    {
        "agreement",
        "coordinator",
        "budget",
        "environment",
        "devices",
        "staging",
        "storage",
        "transfer",
        "commit",
        "vanishing",
        "filesystems",
        "lustre",
        "codec",
        "direct_choice",
        "gds",
        "gds_choice",
        "rates",
        "nodes",
        "pacing",
        "gathering",
        "parts",
    },
    {"exchange", "reader", "steps", "placing", "divided", "draft"},
    {"retention", "step_copies", "tiers", "no_steps"},
    {"pipeline", "file_save", "step_save", "step_load", "step_choice", "template"}
    | {"drain", "tiered_save", "tiered_restore"}
    | {"step_capture", "spread", "distcp_save", "distcp_load"}
    | {"directory_save", "directory_check"}
    | {"new_file", "step_files", "stock_save"},
    {"api", "checkpointer"},
    {"integrations", "cli", "__main__"},
]
LAYER_OF = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}
# Only these speak to the extension module.
ENGINE_USERS = {"devices", "gds", "rates", "running_calls", "staging", "storage"}
# Only these may go through the public names; to the core, fastckpt/__init__.py is upwards.
PUBLIC_NAME_USERS = LAYERS[-1]

PYTHON_BINDINGS = {"bindings.cc", "bindings_gds.cc", "bindings_threads.cc"}
PYTHON_HEADER = re.compile(r"^(pybind11/|Python\.h)")
DEVICE_HEADER = re.compile(
    r"^(torch/|ATen/|c10/|caffe2/|cuda(?!_shim)|cufile(?!_shim)|nvml|thrust/|cub/)"
)


def module_name(path: Path, root: Path) -> str:
    """fastckpt/formats/distcp.py -> formats.distcp; fastckpt/__init__.py -> ''."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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
    """Every import that points the wrong way, and every module without a layer."""
    found = []
    for name, (tree, is_package) in package.items():
        room = name.partition(".")[0]
        if room and room not in LAYER_OF:
            found.append(f"{name}: no layer in {Path(__file__).name}; give it one")
            continue
        for line, target in imports_in_package(name, tree, is_package, set(package)):
            target_room = target.partition(".")[0]
            where = f"{name or '__init__'}:{line}"
            if target == "_engine":
                if room not in ENGINE_USERS:
                    found.append(f"{where}: only {sorted(ENGINE_USERS)} import {PACKAGE}._engine")
            elif target_room == "":
                if room and room not in PUBLIC_NAME_USERS:
                    found.append(f"{where}: imports the public names, which are above it")
            elif target_room not in LAYER_OF:
                continue  # reported above, as a module without a layer
            elif room == "":
                if target_room in PUBLIC_NAME_USERS:
                    found.append(f"{where}: the public names do not include {target_room}")
            elif LAYER_OF[target_room] > LAYER_OF[room]:
                found.append(f"{where}: imports {target}, which is above it")
    return found


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
    return {name: (ast.parse(text), name == "formats") for name, text in texts.items()}


def test_imports_point_one_way() -> None:
    package = read_package(ROOT / PACKAGE)
    assert {"", "errors", "image"} <= set(package)
    assert not faults(package), "\n" + "\n".join(faults(package))


def test_imports_do_not_run_in_circles() -> None:
    assert not cycles(read_package(ROOT / PACKAGE))


def test_csrc_knows_neither_python_nor_devices() -> None:
    paths = sorted([*(ROOT / "csrc").glob("*.cc"), *(ROOT / "csrc").glob("*.h")])
    assert {ROOT / "csrc" / name for name in PYTHON_BINDINGS} <= {*paths}
    found = [fault for path in paths for fault in header_faults(path.name, path.read_text("utf-8"))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "package",
    [
        scratch(errors="", image="from fastckpt import pipeline", pipeline=""),
        scratch(image="from .pipeline import save", pipeline=""),
        scratch(storage="def f():\n    import fastckpt.api", api=""),
        scratch(formats="", formats__zip="from ..staging import Arena", staging=""),
        scratch(pipeline="from fastckpt import _engine"),
        scratch(pipeline="import fastckpt._engine as core"),
        scratch(commit="import fastckpt"),
        scratch(commit="from fastckpt import SaveHandle"),
        scratch(**{"": "from fastckpt.cli import main", "cli": ""}),
        scratch(novelty=""),
    ],
)
def test_wrong_direction_is_found(package: dict[str, tuple[ast.Module, bool]]) -> None:
    assert len(faults(package)) == 1


def test_right_direction_passes() -> None:
    package = scratch(
        errors="import os",
        image="from fastckpt.errors import CheckpointError",
        formats="from . import zip",
        formats__zip="from ..image import Image",
        storage="from fastckpt import _engine, errors",
        commit="from fastckpt.storage import rename",
        handle="from .errors import CheckpointError",
        pipeline="from fastckpt.handle import SaveHandle\nfrom fastckpt import commit",
        cli="import fastckpt\nfrom fastckpt import save",
    )
    assert faults(package) == []
    assert cycles(package) == []


def test_circle_is_found() -> None:
    package = scratch(storage="from . import commit", commit="from . import storage")
    assert faults(package) == []
    assert cycles(package) == ["commit -> storage -> commit"]


@pytest.mark.parametrize(
    ("file_name", "text"),
    [
        ("engine.cc", "#include <pybind11/pybind11.h>\n"),
        ("engine.h", '#  include "Python.h"\n'),
        ("bindings.cc", "#include <torch/extension.h>\n"),
        ("arena.cc", "#include <cuda_runtime.h>\n"),
        ("gds_file.cc", "#include <cufile.h>\n"),
    ],
)
def test_wrong_header_is_found(file_name: str, text: str) -> None:
    assert len(header_faults(file_name, text)) == 1
