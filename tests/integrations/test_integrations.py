"""What holds for every integration: each names the versions that it knows."""

from __future__ import annotations

import importlib.metadata

import pytest

from fastckpt.integrations import require
from tests.kit import interpreters

MODULE = "fastckpt.integrations.example"


def test_a_version_in_range_is_returned() -> None:
    assert require("numpy", "1.0", "1000", MODULE) == importlib.metadata.version("numpy")


def test_a_missing_framework_is_named_with_the_versions_supported() -> None:
    expected = f"{MODULE} needs no-such-framework >= 1.2, < 3, which is not installed: pip install"
    with pytest.raises(ImportError, match=expected):
        require("no-such-framework", "1.2", "3", MODULE)


@pytest.mark.parametrize(("at_least", "below"), [("1000", "2000"), ("0.1", "0.2")])
def test_a_version_out_of_range_is_told_with_those_supported(at_least: str, below: str) -> None:
    installed = importlib.metadata.version("numpy")
    expected = f"needs numpy >= {at_least}, < {below}; {installed} is installed"
    with pytest.raises(ImportError, match=expected):
        require("numpy", at_least, below, MODULE)


def test_versions_are_ordered_by_number_and_not_by_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _package: "0.16.1")
    assert require("megatron-core", "0.9", "0.17", MODULE) == "0.16.1"


OLD_TORCH = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: "2.5.1" if name == "torch" else version(name)
try:
    import fastckpt.integrations.dcp
except ImportError as error:
    print(error)
"""


def test_dcp_says_which_torch_it_needs() -> None:
    done = interpreters.run(OLD_TORCH)
    assert "dcp needs torch >= 2.6, < 3; 2.5.1 is installed" in done.stdout, done.stderr
