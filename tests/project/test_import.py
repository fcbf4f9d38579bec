"""Promise: `import fastckpt` brings what save() and load() need and nothing else, the other public
names come when they are named, and no save waits for an import.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest

import fastckpt
from tests.kit.paths import ROOT

# Prints the modules that each line of it has imported, other than torch's own.
SCRIPT = """
import json, sys, torch
state, told = {"weight": torch.ones(70_000), "step": 3}, {}

def tell(what):
    global before
    told[what] = sorted(name for name in {*sys.modules} - before if name.split(".")[0] != "torch")
    before = {*sys.modules}

before = {*sys.modules}
import fastckpt
tell("import")
fastckpt.save(state, "a.pt").result()
fastckpt.load("a.pt")
tell("file")
checkpointer = fastckpt.Checkpointer("run")
state["own"] = fastckpt.PerRank(4)
tell("named")
checkpointer.save(1, state).result()
checkpointer.close()
tell("step")
fastckpt.export({"weight": state["weight"]}, "export").result()
told["dcp"] = [name for name in sys.modules if name == "torch.distributed.checkpoint"]
import fastckpt.integrations
told["all"] = [*sys.modules]
print(json.dumps(told))
"""
FRAMEWORKS = {"megatron", "deepspeed", "lightning", "pytorch_lightning", "transformers"}
FRAMEWORKS |= {"accelerate", "torch.distributed.checkpoint", "torchtitan"}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SCRIPT}"]
    folder = tmp_path_factory.mktemp("import")
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    told: dict[str, list[str]] = json.loads(done.stdout)
    return told


def rooms(names: list[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("fastckpt.")}


def test_the_package_imports_what_a_file_needs(imported: dict[str, list[str]]) -> None:
    others = {name.partition(".")[0] for name in imported["import"]} - {"fastckpt"}
    assert not others - {*sys.stdlib_module_names}
    assert {"api", "errors", "saving", "files"} <= rooms(imported["import"])
    later = {"directories", "steps", "tiers", "lazy", "integrations", "cli"}
    assert not rooms(imported["import"]) & later
    assert "fastckpt.api.checkpointer" not in imported["import"]
    assert "steps" in rooms(imported["named"])


def test_no_save_imports(imported: dict[str, list[str]]) -> None:
    assert not rooms(imported["file"]) and not rooms(imported["step"])


def test_an_export_does_not_import_what_takes_a_second(imported: dict[str, list[str]]) -> None:
    assert not imported["dcp"]


def test_no_framework_is_imported_before_its_integration(imported: dict[str, list[str]]) -> None:
    assert "fastckpt.integrations" in imported["all"]
    assert not FRAMEWORKS & {*imported["all"]}


def test_every_public_name_is_there() -> None:
    for name in [*fastckpt.__all__, "open"]:
        assert getattr(fastckpt, name) is not None and name in dir(fastckpt)
    everything: dict[str, object] = {}
    exec("from fastckpt import *", everything)
    assert {*fastckpt.__all__} <= {*everything} and "open" not in everything
    with pytest.raises(AttributeError, match="module 'fastckpt' has no attribute 'Checkpoint'"):
        fastckpt.Checkpoint  # type: ignore[attr-defined]  # noqa: B018


def test_names_that_come_later_can_be_pickled() -> None:
    for value in (fastckpt.Checkpointer, fastckpt.load_into, fastckpt.open, fastckpt.StorageError):
        assert pickle.loads(pickle.dumps(value)) is value
