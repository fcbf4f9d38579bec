"""Promise: type checkers see the package, installed editable or not, and know what its arguments
may be. What mypy says of the package itself, and stubtest of the names in the extension, is `make
check`.
"""

from __future__ import annotations

import ast
import os
import re
from typing import Any, Literal, get_args, get_type_hints

import pytest
from setuptools.dist import Distribution

import fastckpt
from fastckpt import _engine
from tests.kit.paths import ROOT
from tests.kit.torches import dcp, needs_dcp


def test_an_editable_install_is_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which type checkers follow: they do not run the finder that setuptools else installs."""
    editable = pytest.importorskip("setuptools.command.editable_wheel")
    monkeypatch.chdir(ROOT)
    distribution = Distribution({"name": "fastckpt", "version": fastckpt.__version__})
    distribution.parse_config_files()
    command: Any = editable.editable_wheel(distribution)
    command.ensure_finalized()
    chosen = command._select_strategy("fastckpt", "cp3-none-any", "build")
    assert type(chosen).__name__ == "_StaticPth"
    assert [os.path.realpath(path) for path in chosen.path_entries] == [str(ROOT)]
    assert (ROOT / "fastckpt" / "py.typed").exists()


def test_choices_are_literals() -> None:
    hints = get_type_hints(fastckpt.SaveOptions)
    assert hints["fence"] == Literal["call", "step"]
    assert hints["backend"] == Literal["auto", "io_uring", "threads"]
    assert hints["staging"] == Literal["host", "gds"]
    assert hints["on_error"] == Literal["raise", "warn"]


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (fastckpt, "save"),
        (fastckpt, "export"),
        (fastckpt.Checkpointer, "__init__"),
        pytest.param(dcp, "async_save", marks=needs_dcp),
    ],
)
def test_saves_take_save_options(of: Any, name: str) -> None:
    hint = get_type_hints(getattr(of, name))["options"]
    assert fastckpt.SaveOptions in (hint, *get_args(hint))


def test_restore_has_a_type() -> None:
    hints = get_type_hints(fastckpt.Checkpointer.restore)
    assert hints["return"] == int | None and hints["state"] is not Any


def parameters(function: ast.FunctionDef, *, is_method: bool) -> list[str]:
    """Returns the names by which arguments can be given, "" for those by position alone; "=" marks
    those that have a default.
    """
    positional = function.args.posonlyargs
    names = ["" for _ in positional] + [
        "" if re.fullmatch(r"arg\d+", argument.arg) else argument.arg  # pybind11's own, no keyword
        for argument in function.args.args
    ]
    first_default = len(names) - len(function.args.defaults)
    marked = [f"{name}=" if k >= first_default else name for k, name in enumerate(names)]
    return marked[1:] if is_method else marked


def bound_parameters(function: Any, *, is_method: bool) -> list[str]:
    """Returns the parameters of a function of the extension, which its docstring opens with."""
    line = function.__doc__.splitlines()[0].replace("::", ".")
    (parsed,) = ast.parse(f"def {line}: ...").body
    assert isinstance(parsed, ast.FunctionDef)
    return parameters(parsed, is_method=is_method)


def test_the_stub_has_the_parameters_of_the_extension() -> None:
    stub = ast.parse((ROOT / "fastckpt" / "_engine.pyi").read_text("utf-8"))
    told, bound = {}, {}
    for node in stub.body:
        if isinstance(node, ast.FunctionDef):
            told[node.name] = parameters(node, is_method=False)
            bound[node.name] = bound_parameters(getattr(_engine, node.name), is_method=False)
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and not method.decorator_list:
                name = f"{node.name}.{method.name}"
                told[name] = parameters(method, is_method=True)
                of_class = getattr(getattr(_engine, node.name), method.name)
                bound[name] = bound_parameters(of_class, is_method=True)
    assert told == bound and "Engine.stage" in told and "crc32" in told
