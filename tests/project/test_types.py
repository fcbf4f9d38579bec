"""Promise: type checkers see the package, installed editable or not, and know what its arguments
may be. What mypy says of the package itself is `make check`.
"""

from __future__ import annotations

import os
from typing import Any, Literal, get_type_hints

import pytest
from setuptools.dist import Distribution

import fastckpt
from tests.paths import ROOT
from tests.torches import dcp, needs_dcp


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


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (fastckpt, "save"),
        (fastckpt.Checkpointer, "__init__"),
        pytest.param(dcp, "async_save", marks=needs_dcp),
    ],
)
def test_choices_are_literals(of: Any, name: str) -> None:
    hints = get_type_hints(getattr(of, name))
    assert hints["fence"] == Literal["call", "step"]
    if "backend" in hints:
        assert hints["backend"] == Literal["auto", "io_uring", "threads"]
        assert hints["staging"] == Literal["host", "gds", "auto"]
    else:
        assert hints["on_error"] == Literal["raise", "warn"]


def test_restore_has_a_type() -> None:
    hints = get_type_hints(fastckpt.Checkpointer.restore)
    assert hints["return"] == int | None and hints["state"] is not Any
