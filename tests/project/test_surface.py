"""Promise: the public surface is small enough to read in a minute."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import fastckpt
from fastckpt.integrations import dcp
from tests.kit.paths import ROOT


def test_a_checkpointer_takes_few_arguments_and_each_of_them_chooses() -> None:
    arguments = [*inspect.signature(fastckpt.Checkpointer).parameters]
    assert len(arguments) <= 17, arguments
    for name, hint in get_type_hints(fastckpt.Checkpointer.__init__).items():
        values = [value for part in (hint, *get_args(hint)) for value in get_args(part)]
        texts = [value for value in values if isinstance(value, str)]
        assert len(texts) != 1, f"{name} has one value: it is a flag"


def test_source_that_is_not_compiled_says_so(tmp_path: Path) -> None:
    compiled = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "fastckpt", tmp_path / "fastckpt", ignore=compiled)
    command = [sys.executable, "-c", "import fastckpt"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert f"ImportError: {str(tmp_path / 'fastckpt')!r} is fastckpt's source" in ended.stderr


def test_what_all_saves_take_is_named_in_one_place() -> None:
    """A function that takes two of them would document and check them again; loads take two, too,
    but have no SaveOptions.
    """
    common = {field.name for field in fields(fastckpt.SaveOptions)}
    found = set()
    for path in sorted((ROOT / "fastckpt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names = {its.arg for its in (*node.args.args, *node.args.kwonlyargs)}
                found |= {f"{path.stem}.{node.name}"} if len(names & common) > 1 else set()
    assert found == {"files.load", "transfer.__init__"}


def test_a_handle_has_the_methods_of_the_table_and_no_others() -> None:
    table = (
        (ROOT / "docs" / "reference" / "arguments.md")
        .read_text("utf-8")
        .partition("## The handle")[2]
    )
    named = {*re.findall(r"^\| `(\w+)\(", table.partition("\n\nYou need not")[0], re.MULTILINE)}
    own = _methods(fastckpt.SaveHandle)
    assert own - {*dir(Future)} == named - {*dir(Future)}
    assert named <= own
    assert _methods(dcp.Saving) == own


def _methods(kind: type) -> set[str]:
    public = (name for name in dir(kind) if not name.startswith("_"))
    return {name for name in public if not isinstance(getattr(kind, name), property)}
