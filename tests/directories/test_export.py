"""Exports as Hugging Face directories: stock readers find each tensor bit by bit, whoever held it,
and a directory is there whole or not at all.

Responsible also for what is refused, and what is told then. Must not know how files become visible:
test_directory_save.py does.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import fastckpt
from fastckpt.directories import directory_plan, export
from fastckpt.directories.save import wait_for_directories
from fastckpt.directories.shared_files import SharedFile, SharedTensor
from fastckpt.directories.verify import check
from fastckpt.engine.staging import Allowance
from fastckpt.errors import CheckpointError, PeerFailed, RanksDisagree, StagingConflict
from fastckpt.formats.file_list import File
from fastckpt.plan.boxes import Box, Piece
from fastckpt.state.tree import Leaf
from fastckpt.storage.file_system import Storage
from tests.crews import export_bodies as bodies
from tests.crews.group_crew import Crew, Nursery, RankDied
from tests.crews.steps_states import TENSORS, content, numbers, same_bits
from tests.kit.accelerator import KIND
from tests.kit.cuda_stub import CudaStub
from tests.kit.doubles import (
    Crash,
    FailAt,
    PowerCut,
    Recorder,
    assert_old_or_new,
    power_cuts,
    through,
)
from tests.kit.interpreters import let_go
from tests.kit.storm import Storm

RANKS_IMPORT = "tests.crews.export_bodies"
INDEX = "model.safetensors.index.json"
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def nothing_is_being_removed(disk: Path) -> Iterator[None]:
    """What exports have replaced is gone before the directory is looked at."""
    yield
    wait_for_directories(str(disk))
    wait_for_directories(str(disk / "hf"))


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of an export, by stock safetensors; fails unless the index names just them."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in [*file.keys()]:
                assert name not in found
                found[name] = file.get_tensor(name)
    index = directory / INDEX
    if index.exists():
        told = json.loads(index.read_text())
        assert told["weight_map"].keys() == found.keys()
        assert told["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
        for name, file in told["weight_map"].items():
            with safetensors.safe_open(directory / file, "pt") as opened:
                assert name in [*opened.keys()]
    assert check(str(directory), Storage())
    return found


def assert_holds(
    directory: Path, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> None:
    found = loaded(directory)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        is_cast = dtype is not None and tensor.dtype.is_floating_point
        assert same_bits(found[name], tensor.to(dtype) if is_cast else tensor), name


DTYPES = [None, torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shard_bytes", "files"), [("5GB", 1), ("1MB", 6), (1, 9)])
def test_stock_readers_find_each_tensor(
    disk: Path, dtype: torch.dtype | None, shard_bytes: int | str, files: int
) -> None:
    state = {key: content(key) for key in TENSORS}
    fastckpt.export(state, disk / "a", dtype=dtype, shard_bytes=shard_bytes).result(WAIT_S)
    assert_holds(disk / "a", state, dtype)
    there = len([*disk.glob("a/*.safetensors")])
    assert there == files if dtype is None else there <= 9


@pytest.mark.parametrize("budget_bytes", [8 << 20, 64 << 20])
def test_tensors_that_cross_blocks(disk: Path, budget_bytes: int) -> None:
    state = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "large": torch.randn(5 << 20),
        "wide": torch.randn(1025, 1023, dtype=torch.float64),
        "turned": torch.randn(1500, 1400).t(),
        "a/b": torch.randn(7),
    }
    with through(Storage(), budget_bytes):
        fastckpt.export(state, disk / "a", dtype=torch.bfloat16).result(WAIT_S)
    assert_holds(disk / "a", state, torch.bfloat16)


def test_files_are_copied_as_they_were_at_the_call(disk: Path) -> None:
    config, empty = disk / "config.json", disk / "empty.txt"
    config.write_text("{}")
    empty.write_text("")
    handle = fastckpt.export({"a": torch.ones(2)}, disk / "a", files=[config, str(empty)])
    config.write_text("{other}")
    handle.result(WAIT_S)
    assert loaded(disk / "a").keys() == {"a"}
    assert (disk / "a" / "config.json").read_text() == "{}"
    assert (disk / "a" / "empty.txt").read_text() == ""


def test_each_tensor_gets_the_dtype_of_the_first_glob_of_its_name(disk: Path) -> None:
    block = {"router": {"weight": torch.randn(9, 5), "bias": torch.randn(9)}, "norm": torch.ones(7)}
    state = {"layers": [block, block["norm"] * 2], "ids": torch.arange(5)}
    dtype = {"*.router.bias": "fp32", "layers.1": None, "*norm": torch.float64, "*": "bfloat16"}
    fastckpt.export(state, disk / "a", dtype=dtype).result(WAIT_S)
    assert {name: tensor.dtype for name, tensor in loaded(disk / "a").items()} == {
        "layers.0.router.weight": torch.bfloat16,
        "layers.0.router.bias": torch.float32,
        "layers.0.norm": torch.float64,
        "layers.1": torch.float32,
        "ids": torch.int64,
    }
    fastckpt.export(state, disk / "b", dtype={"*.weight": "fp16"}, only="layers/0/*").result(WAIT_S)
    found = loaded(disk / "b")
    assert found["layers.0.router.weight"].dtype == torch.float16
    assert torch.equal(found["layers.0.norm"], block["norm"])


@pytest.mark.parametrize(
    ("dtypes", "told"),
    [
        ({"a": torch.float32, "b": torch.bfloat16}, "bfloat16"),
        ({"a": torch.bfloat16, "b": torch.float32}, "float32"),
        ({"a": torch.float16, "b": torch.float8_e4m3fn}, "float16"),
        ({"a": torch.float16, "b": torch.int8}, "float16"),
        ({"a": torch.int8, "b": torch.float8_e4m3fn}, "float8_e4m3fn"),
        ({"a": torch.int8, "b": torch.int8}, "as before"),
    ],
)
def test_the_config_names_the_dtype_of_most_elements(
    dtypes: dict[str, torch.dtype], told: str, disk: Path
) -> None:
    (disk / "config.json").write_text('{"torch_dtype": "as before"}')
    sizes = {"a": 100, "b": 150}  # in bytes, the first may be larger
    state = {name: torch.zeros(sizes[name], dtype=dtype) for name, dtype in dtypes.items()}
    fastckpt.export(state, disk / "a", files=[disk / "config.json"]).result(WAIT_S)
    assert json.loads((disk / "a" / "config.json").read_bytes())["torch_dtype"] == told


def test_dtypes_of_today_are_exported_and_not_cast(disk: Path) -> None:
    names = ("float4_e2m1fn_x2", "float8_e8m0fnu", "float8_e4m3fnuz", "complex64")
    state = {
        name: torch.arange(96, dtype=torch.uint8).view(getattr(torch, name)).view(2, -1)
        for name in names
        if hasattr(torch, name)
    }
    state["conj"] = torch.randn(3, 4, dtype=torch.complex64).conj()
    fastckpt.export(state, disk / "a", dtype="bf16").result(WAIT_S)
    found = loaded(disk / "a")
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        ours, theirs = found[name].contiguous(), tensor.resolve_conj().contiguous()
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name


def test_the_config_names_the_dtype_of_the_export(disk: Path) -> None:
    config = disk / "config.json"
    config.write_text('{"model_type": "llama", "dtype": "float32"}')
    for dtype, name in ((torch.bfloat16, "bfloat16"), (None, "float32")):
        made = fastckpt.export({"a": torch.ones(2)}, disk / name, dtype=dtype, files=[config])
        made.result(WAIT_S)
        assert json.loads((disk / name / "config.json").read_bytes())["dtype"] == name
    assert (disk / "float32" / "config.json").read_bytes() == config.read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_a_model_of_transformers_brings_its_config(disk: Path, dtype: torch.dtype | None) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 50}
    config = transformers.LlamaConfig(num_attention_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config)
    fastckpt.export(nn.DataParallel(model), disk / "a", dtype=dtype).result(WAIT_S)
    opened = transformers.AutoModelForCausalLM.from_pretrained(disk / "a", dtype="auto")
    assert type(opened) is type(model) and opened.dtype == (dtype or torch.float32)
    assert opened.config.architectures == ["LlamaForCausalLM"]
    weight = model.lm_head.weight.to(dtype or torch.float32)
    assert torch.equal(opened.lm_head.weight, weight)
    (disk / "config.json").write_text("{}")
    fastckpt.export(model, disk / "b", files=[disk / "config.json"]).result(WAIT_S)
    assert (disk / "b" / "config.json").read_text() == "{}"


class Odd(nn.Linear):
    """A module whose config is none of transformers'."""

    config = SimpleNamespace(to_json_string=lambda: "no JSON")


def test_an_export_without_a_config_is_told_once(
    disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for state in (nn.Linear(2, 3), {"a": torch.ones(2)}, Odd(2, 3)):
        monkeypatch.setattr(export, "_has_warned", False)
        for turn in range(2):
            fastckpt.export(state, disk / f"{turn}").result(WAIT_S)
        (told,) = [each for each in caplog.messages if "has no config.json" in each]
        assert "pass the path of a config.json in files=" in told
        caplog.clear()
    assert not (disk / "0" / "config.json").exists()


def test_it_goes_back_into_the_state(disk: Path) -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))

    model, other = made(), made()
    fastckpt.export({"model": model}, disk / "a", shard_bytes=1000).result(WAIT_S)
    fastckpt.load_into({"model": other}, disk / "a")
    for name, tensor in model.state_dict().items():
        assert same_bits(other.state_dict()[name], tensor), name
    with fastckpt.open(disk / "a") as tensors:
        assert same_bits(tensors["model.0.weight"][...], model.state_dict()["0.weight"])


def test_names(disk: Path) -> None:
    tied, other = torch.ones(3), torch.zeros(4)
    state = {
        "step": 7,
        "model": {"embed.weight": tied, "blocks": [other, torch.arange(3)], "head.weight": tied},
        "optimizer": {"exp_avg": torch.randn(5)},
    }
    model = {"embed.weight": tied, "blocks.0": other, "blocks.1": torch.arange(3)}
    fastckpt.export(state, disk / "all").result(WAIT_S)
    assert loaded(disk / "all").keys() == {*(f"model.{name}" for name in model)} | {
        "optimizer.exp_avg"
    }
    fastckpt.export(state, disk / "a", only="model/*", rename={"^model/": ""}).result(WAIT_S)
    assert_holds(disk / "a", model)

    def without_embedding(name: str) -> str | None:
        return None if "embed" in name else name

    fastckpt.export(state["model"], disk / "b", rename=without_embedding).result(WAIT_S)
    assert loaded(disk / "b").keys() == {"blocks.0", "blocks.1", "head.weight"}


def test_names_of_wrapped_modules(disk: Path) -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(3, 2))
    plain.append(torch.compile(torch.nn.Linear(2, 2)))
    bare = {"0.weight", "0.bias", "1.weight", "1.bias"}
    parallel = torch.nn.DataParallel(plain)
    for name, wrapped in {
        "a": torch.compile(plain),
        "b": parallel,
        "c": {"module": parallel},
    }.items():
        fastckpt.export(wrapped, disk / name).result(WAIT_S)
        assert loaded(disk / name).keys() == bare
    own = {"module.w": torch.ones(3), "w": torch.zeros(3)}
    fastckpt.export({"model": torch.compile(plain), **own}, disk / "d").result(WAIT_S)
    assert loaded(disk / "d").keys() == {f"model.{name}" for name in bare} | own.keys()
    own = {"_orig_mod.w": torch.ones(3), "w": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"'w' would be named 'w', which is already the name"):
        fastckpt.export(own, disk / "e")


@pytest.mark.parametrize("fence", ["call", "step"])
def test_what_was_there_at_the_call_is_exported(disk: Path, fence: Any) -> None:
    state = {"small": torch.ones(100), "large": torch.ones(1 << 20)}
    handle = fastckpt.export(
        state, disk / "a", dtype=torch.float16, options=fastckpt.SaveOptions(fence=fence)
    )
    state["small"].add_(1)
    handle.wait_staged(WAIT_S)
    if fence == "call":
        state["large"].add_(1)
    handle.result(WAIT_S)
    found = loaded(disk / "a")
    assert all(bool((tensor == 1).all()) for tensor in found.values())


def test_a_tensor_that_changes_too_early_fails_the_export(disk: Path) -> None:
    weight, gate = torch.zeros(1 << 20), threading.Event()
    with through(Storage()) as pipeline:
        real = pipeline.staging.allowance

        def late(nbytes: int | None) -> Allowance:
            assert gate.wait(WAIT_S)
            return real(nbytes)

        pipeline.staging.allowance = late  # type: ignore[method-assign]
        handle = fastckpt.export(
            {"weight": weight}, disk / "a", options=fastckpt.SaveOptions(fence="step")
        )
        weight.add_(1)
        gate.set()
        with pytest.raises(StagingConflict, match="weight"):
            handle.result(WAIT_S)
    assert os.listdir(disk) == []


def test_what_lies_on_a_gpu(gpu: CudaStub, disk: Path) -> None:
    weight = torch.randn(3000, 1000)
    state = {"weight": weight.to(KIND), "turned": weight.to(KIND).t(), "small": torch.ones(3)}
    handle = fastckpt.export(state, disk / "a", dtype=torch.bfloat16)
    nbytes = state["weight"].nbytes
    gpu.kernel_at(state["weight"].data_ptr(), nbytes, 0xEE, 0, 0)  # after the copy
    assert handle.result(WAIT_S).staging == "pinned"
    expected = {"weight": weight, "turned": weight.t(), "small": torch.ones(3)}
    assert_holds(disk / "a", expected, torch.bfloat16)


@pytest.mark.parametrize("device", ["cpu", KIND])
@pytest.mark.parametrize(
    ("held", "stored", "large"),
    [
        (torch.float32, torch.float16, 1e6),
        (torch.bfloat16, torch.float16, 1e6),
        (torch.float32, torch.bfloat16, torch.finfo(torch.float32).max),
        (torch.float64, torch.float32, 1e300),
    ],
    ids=str,
)
def test_numbers_that_do_not_stay_finite_are_told_once(
    gpu: CudaStub,
    disk: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *,
    device: str,
    held: torch.dtype,
    stored: torch.dtype,
    large: float,
) -> None:
    """Whether they are converted when they are copied, or when they are written."""
    monkeypatch.setattr(directory_plan, "_lossy_told", set())
    state = {name: torch.ones(20_000, dtype=held) for name in ("fits", "masked", "lost", "last")}
    state["masked"][7] = -math.inf
    state["masked"][9] = math.nan
    state["lost"][12_345] = large
    state["last"][-1] = -large
    state = {name: tensor.to(device) for name, tensor in state.items()}
    for name in ("a", "b"):
        fastckpt.export(state, disk / name, dtype=stored).result(WAIT_S)
    told = [line for line in caplog.messages if "not finite" in line]
    assert len(told) == 1 and "numbers of 'last', 'lost' are too large" in told[0]


class _Odd(torch.Tensor):
    pass


def test_a_pattern_that_fits_no_name_is_refused(disk: Path) -> None:
    state = {"model": {"encoder.w": torch.ones(2), "b": torch.ones(1)}, "step": torch.ones(1)}
    with pytest.raises(
        ValueError, match=r"'\^encodr', .* no name \(similar names there: 'encoder.w'"
    ):
        fastckpt.export(
            state, disk / "a", only="model/*", rename={"^model/": "", "^encodr": "backbone"}
        )
    assert os.listdir(disk) == []


def test_what_files_cannot_hold_is_named(disk: Path) -> None:
    state = {
        "good": torch.ones(2),
        "complex": torch.zeros(2, dtype=torch.complex128),
        "sparse": torch.zeros(2, 2).to_sparse(),
        "meta": torch.zeros(2, device="meta"),
        "odd": torch.zeros(2).as_subclass(_Odd),
    }
    with pytest.raises(TypeError) as caught:
        fastckpt.export(state, disk / "a")
    assert str(caught.value) == (
        "safetensors files cannot hold all of the state: 'complex' is of torch.complex128; "
        "'sparse' is of layout torch.sparse_coo; 'meta' is on the meta device; 'odd' is a _Odd"
    )
    assert os.listdir(disk) == []
    only = {"rename": lambda name: name if name == "good" else None}
    fastckpt.export(state, disk / "a", **only).result(WAIT_S)
    assert loaded(disk / "a").keys() == {"good"}


@pytest.mark.parametrize(
    ("state", "options", "error", "told"),
    [
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, {}, ValueError, "'a.b' would be named"),
        ({"__metadata__": torch.ones(1)}, {}, ValueError, "the header"),
        ({"a": torch.ones(1)}, {"only": "b*"}, ValueError, "only='b.' and rename leave out a$"),
        (
            {"a": torch.ones(1)},
            {"rename": {"a": ""}},
            ValueError,
            "the new name of 'a' is empty",
        ),
        (torch.ones(1), {}, ValueError, "has no name, because it is not in a dict or"),
        ({"a": 1}, {}, ValueError, "no tensor"),
        ({"a": torch.ones(1)}, {"dtype": torch.int8}, ValueError, "floating-point"),
        ({"a": torch.ones(1)}, {"dtype": "int8"}, ValueError, "'int8', must be one of fp32, bf16"),
        ({"a": torch.ones(1)}, {"dtype": {"a": torch.int8}}, ValueError, "floating-point"),
        ({"a": torch.ones(1)}, {"dtype": {"*": 16}}, TypeError, "a dict of globs and these"),
        ({"a.b": torch.ones(1)}, {"dtype": {"*.bb": "bf16", "*": None}}, ValueError, "matches no"),
        ({"a": torch.ones(1)}, {"shard_bytes": 0}, ValueError, "shard_bytes"),
        ({"a": torch.ones(1)}, {"rename": 3}, TypeError, "rename"),
        ({"a": torch.ones(1)}, {"files": "config.json"}, TypeError, "list of paths"),
        ({"a": torch.ones(1)}, {"files": ["x/config.json", "config.json"]}, OSError, "No such"),
        ({"a": torch.ones(1)}, {"files": ["model.safetensors"]}, ValueError, "of another file"),
        ({"a": torch.ones(1)}, {"files": ["x/fastckpt.json"]}, ValueError, "of another file"),
        ({"a": torch.ones(1)}, {"files": [INDEX]}, ValueError, "of another file"),
        ({"a": torch.ones(1)}, {"files": ["/tmp"]}, ValueError, "'/tmp', which is a directory: g"),
        ({"a": torch.ones(1)}, {"files": ["/dev/null"]}, ValueError, "which is not a regular file"),
    ],
    ids=lambda value: "",
)
def test_what_cannot_be_exported_is_told_at_once(
    disk: Path, state: Any, options: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        fastckpt.export(state, disk / "a", **options)
    assert os.listdir(disk) == []


def test_a_file_that_is_too_large_is_not_cut(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastckpt.directories.export._FILE_BYTES_MAX", 1000)
    config = disk / "config.json"
    config.write_text("x" * 1000)
    fastckpt.export({"a": torch.ones(1)}, disk / "a", files=[config]).result(WAIT_S)
    assert (disk / "a" / "config.json").read_text() == "x" * 1000
    config.write_text("x" * 1001)
    with pytest.raises(ValueError, match=r"config.json', which is larger than 1000 B:"):
        fastckpt.export({"a": torch.ones(1)}, disk / "b", files=[config])
    assert not (disk / "b").exists()


def test_a_file_with_bytes_missing_is_not_committed() -> None:
    box = Box((0,), (10,))
    leaf = Leaf("a", torch.randn(10), (10,), box, (0,), "replicated")
    its = [SharedTensor("a", torch.float32, leaf)]
    shared = SharedFile("f", its, [[Piece(0, box, 0)]], {}, is_first=True)
    with pytest.raises(CheckpointError, match="ranks have written 7 bytes of 'f', which must have"):
        shared.joined([File(7, 0)])


def test_what_is_not_of_an_export_stays(disk: Path) -> None:
    """A file that has the name of one of the export prevents it."""
    fastckpt.export({"a": torch.ones(1)}, disk / "a").result(WAIT_S)
    (disk / "a" / "mine.txt").write_text("mine")
    fastckpt.export({"a": torch.zeros(1)}, disk / "a").result(WAIT_S)
    assert (disk / "a" / "mine.txt").read_text() == "mine"
    (disk / "a" / "fastckpt.json").unlink()  # as another program writes it
    with pytest.raises(CheckpointError, match=r"needs \(model.safetensors\)"):
        fastckpt.export({"a": torch.ones(1)}, disk / "a").result(WAIT_S)
    assert not bool(safetensors.torch.load_file(disk / "a" / "model.safetensors")["a"])


def test_a_negated_view_is_not_the_tensor_that_it_views(disk: Path) -> None:
    numbers = torch.tensor([1 + 2j, 3 + 4j])
    fastckpt.export({"a": numbers.imag, "b": numbers.conj().imag}, disk / "a").result(WAIT_S)
    found = loaded(disk / "a")
    assert (found["a"].tolist(), found["b"].tolist()) == ([2, 4], [-2, -4])


def test_the_stats_name_a_backend(disk: Path) -> None:
    stats = fastckpt.export({"a": torch.ones(3)}, disk / "a").result(WAIT_S)
    assert stats.backend == "threads" and str(stats).endswith("; threads")


def sample(step: int) -> dict[str, torch.Tensor]:
    return {"one": torch.full((40, 50), float(step)), "two": torch.full((30,), step)}


def step_in(directory: Path) -> int:
    """Which export is there; fails unless it is whole."""
    found = loaded(directory)
    step = int(found["two"][0])
    assert_holds(directory, sample(step), torch.float16)
    assert (directory / "config.json").read_text() == "{}"
    return step


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_over", [True, False], ids=["over", "new"])
def test_any_operation_may_be_the_last(memory: Path, is_over: bool, storm: Storm) -> None:
    config = memory / "config.json"
    config.write_text("{}")
    options: dict[str, Any] = {"dtype": torch.float16, "shard_bytes": 1000, "files": [config]}
    before = memory / "before"
    before.mkdir()
    if is_over:
        fastckpt.export(sample(1), before / "a", **options).result(WAIT_S)
        wait_for_directories(str(before))

    def save(storage: Crash, live: Path) -> bool:
        with through(storage) as pipeline:
            handle = fastckpt.export(sample(2), live / "a", **options)
            told = handle.exception(WAIT_S) is None
            with suppress(PowerCut):  # what it is for
                pipeline.drain()
        return told

    def find(after: Path) -> int:
        return step_in(after / "a") if (after / "a").exists() else 0

    cuts = power_cuts(before, save, find, mixtures=4, storm=storm)
    assert_old_or_new(cuts, int(is_over), 2, 40)


def test_a_failure_at_any_operation_leaves_the_old_export(memory: Path, storm: Storm) -> None:
    def export(step: int) -> None:
        fastckpt.export(sample(step), memory / "a", dtype=torch.float16).result(WAIT_S)

    recorder, outcomes = Recorder(), set()
    export(0)
    with through(recorder) as pipeline:
        export(0)
        pipeline.drain()
    for number in storm.moments([operation.name for operation in recorder.log], 8):
        visible = True
        with through(FailAt(number, errno.EIO, lasting=True)) as pipeline:
            try:
                export(1)
            except OSError as error:
                visible = bool(getattr(error, "visible", False))
            assert int(loaded(memory / "a")["two"][0]) == int(visible)
            pipeline.drain()
        outcomes.add(visible)
        with through(Storage()):
            export(0)
    assert number > 20 and outcomes == {False, True}


# Several ranks


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_ranks_write_what_they_hold(
    crew: Callable[[int], Crew], disk: Path, ranks: int, dtype: torch.dtype | None
) -> None:
    state = {f"model.{key}": content(key) for key in TENSORS}
    for variation in range(4):
        shard_bytes = ("5GB", "1MB")[variation % 2]
        options = {"dtype": dtype, "shard_bytes": shard_bytes}
        written = crew(ranks)(bodies.export_arranged, str(disk / "a"), variation, options)
        assert_holds(disk / "a", state, dtype)
        index = disk / "a" / INDEX
        size = sum(path.stat().st_size for path in disk.glob("a/*.safetensors"))
        size += index.stat().st_size if index.exists() else 0
        assert sum(written) == size and min(written) > size / ranks / 2, "each byte once"
    assert os.listdir(disk) == ["a"]


@pytest.mark.multiprocess
def test_replicas_and_tied_shards_are_written_once(crew: Callable[[int], Crew], disk: Path) -> None:
    written = crew(2)(bodies.export_tied, str(disk / "a"))
    whole = numbers(0, 6000).reshape(60, 100)
    assert_holds(disk / "a", dict.fromkeys(("same", "columns", "rows"), whole))
    assert sum(written) == (disk / "a" / "model.safetensors").stat().st_size


@pytest.mark.multiprocess
def test_dtensors_need_the_group(crew: Callable[[int], Crew], disk: Path) -> None:
    for outcome in crew(2)(bodies.export_alone, str(disk / "a")):
        assert isinstance(outcome.error, TypeError)
        told = "is spread over a mesh of 2 ranks, but this process saves alone: pass group=, such"
        assert str(outcome.error).count(told) == 1, "of many tensors, one is enough"
    assert os.listdir(disk) == []


@pytest.mark.multiprocess
@pytest.mark.parametrize("what", ["shape", "dtype", "names", "shard_bytes", "content"])
def test_ranks_that_disagree_export_nothing(
    crew: Callable[[int], Crew], disk: Path, what: str
) -> None:
    path = str(disk / "a")
    for outcome in crew(2)(bodies.export_what_differs, path, what):
        assert isinstance(outcome.error, RanksDisagree)
        told = {
            "names": "more is on rank 1",
            "shard_bytes": "the argument shard_bytes is 1000 on rank 1 but 5000000000 on rank 0",
        }
        assert told.get(what, what) in str(outcome.error)
    assert os.listdir(disk) == []
    for outcome in crew(2)(bodies.export_what_differs, path, what):
        assert (outcome.error is None) == (what == "content"), "it is taken from the first rank"
    if what == "content":
        assert_holds(disk / "a", {"content": numbers(0, 20_000).reshape(100, 200)})


@pytest.mark.multiprocess
def test_replicas_that_differ_are_taken_from_the_first_rank(
    crew: Callable[[int], Crew], disk: Path
) -> None:
    path, name = str(disk / "a"), "replica"
    for outcome in crew(2)(bodies.export_what_differs, path, name):
        assert isinstance(outcome.error, RanksDisagree)
    for outcome in crew(2)(bodies.export_what_differs, path, name):
        assert outcome.error is None
    assert_holds(disk / "a", {name: numbers(0, 20_000).reshape(100, 200)})


@pytest.mark.multiprocess
def test_a_difference_that_becomes_known_meanwhile_is_of_the_next_export(
    crew: Callable[[int], Crew], disk: Path
) -> None:
    """An earlier export may find it at any moment, on each rank at another one."""
    crew(2)(bodies.export_while_told_of_differences, str(disk / "a"))
    assert_holds(disk / "a", {name: numbers(0, 20_000).reshape(100, 200) for name in "ab"})


@pytest.mark.multiprocess
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_fails_all(
    crew: Callable[[int], Crew], disk: Path, failing: int
) -> None:
    crew(2)(bodies.export_arranged, str(disk / "a"), 0, {})
    outcomes = crew(2)(bodies.export_while_writes_fail, str(disk / "a"), failing)
    assert isinstance(outcomes[failing].error, fastckpt.StorageError)
    assert isinstance(outcomes[1 - failing].error, PeerFailed)
    assert all("No space left" in str(outcome.error) for outcome in outcomes)
    assert os.listdir(disk) == ["a"]
    assert loaded(disk / "a").keys() == {f"model.{key}" for key in TENSORS}


@pytest.mark.multiprocess
def test_a_rank_that_dies_leaves_the_old_export(
    nursery: Nursery, crew: Callable[[int], Crew], disk: Path
) -> None:
    crew(2)(bodies.export_arranged, str(disk / "a"), 0, {})
    for dying in (0, 1):
        with nursery.crew(2) as mortal:
            outcomes = mortal(bodies.die_while_exporting, str(disk / "a"), dying)
        assert isinstance(outcomes[dying], RankDied)
        assert isinstance(outcomes[1 - dying].error, PeerFailed)
        assert loaded(disk / "a").keys() == {f"model.{key}" for key in TENSORS}
    let_go(disk)
    crew(2)(bodies.export_arranged, str(disk / "a"), 1, {})
    assert os.listdir(disk) == ["a"], "the next one removes what the dead rank has left"
