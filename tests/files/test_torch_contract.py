"""torch.save's contract, between fastckpt.save and stock torch.load and the other way round: every
kind of object that torch saves, the file's records, the places a checkpoint can be written to. Must
not know how a save is carried out.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import errno
import gzip
import inspect
import io
import itertools
import os
import pathlib
import pickle
import random
import shutil
import stat
import sys
import tempfile
import threading
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt.files import plan as files_plan
from tests.kit.pickles import operations

try:
    from torch.utils.serialization import config as torch_config
except ModuleNotFoundError:  # torch before 2.7
    torch_config = None

needs_config = pytest.mark.skipif(torch_config is None, reason="torch 2.7 has it first")

MIB = 1 << 20
GIB = 1 << 30
BLOCK = 8 * MIB  # around which sizes are worth trying: the unit of writing
OWN_RECORDS = {".data/fastckpt"}
LOCAL_HEADER_BYTES = 30


# What the table below saves, by name: an object that a checkpoint refers to must be importable.


class Tagged(torch.Tensor):
    """A subclass with the same storage as any tensor and attributes beside it."""


class Scaled(torch.Tensor):
    """A wrapper subclass: it has no storage, the tensor inside it does."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].inner)
        raise NotImplementedError(str(func))


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Record:
    weight: torch.Tensor
    steps: list[int]


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


class Fleeting:
    """Its state is made while it is pickled and belongs to nobody afterwards."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "made": torch.full((self.size,), float(self.size))}


class SavesInside:
    """Pickling it saves another checkpoint, as samplers and data loaders with a state do."""

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __getstate__(self) -> dict[str, bytes]:
        buffer = io.BytesIO()
        fastckpt.save(self.inner, buffer)
        return {"saved": buffer.getvalue()}

    def __setstate__(self, state: dict[str, bytes]) -> None:
        self.inner = torch.load(io.BytesIO(state["saved"]))


class Net(torch.nn.Module):
    """Tied weights, a buffer, one that is not saved, a hook by reference and a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(5, 5)
        self.decoder = torch.nn.Linear(5, 5)
        self.decoder.weight = self.encoder.weight
        self.layers = torch.nn.ModuleList([torch.nn.BatchNorm1d(5), torch.nn.ReLU()])
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.register_forward_hook(forward_hook)


def forward_hook(module: torch.nn.Module, args: Any, output: Any) -> None:
    """A hook that a module refers to."""


# How the table below makes its objects.


def count(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float64).to(dtype)


def bit_patterns(dtype: torch.dtype, nbytes: int = 256) -> torch.Tensor:
    """Every byte value once, seen as `dtype`: infinities, NaNs and denormals among them."""
    return torch.arange(nbytes, dtype=torch.int32).to(torch.uint8).view(dtype)


def octets_of(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32).remainder_(251).to(torch.uint8)


def attributed(tensor: torch.Tensor, **attributes: Any) -> torch.Tensor:
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def tied() -> dict[str, Any]:
    weight = torch.nn.Parameter(count(12).reshape(3, 4))
    return {"encoder": weight, "decoder": weight, "view": weight.detach().t(), "other": count(12)}


def overlapping() -> list[torch.Tensor]:
    base = count(100)
    return [base[10:60], base[40:90], base[::7], base[99:], base]


def cyclic() -> list[Any]:
    loop: list[Any] = [count(3)]
    loop.append({"again": loop, "tensor": loop[0]})
    return loop


def trained(optimizer: str) -> dict[str, Any]:
    net = Net()
    made = getattr(torch.optim, optimizer)(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, T_max=10)
    for _ in range(2):
        net.decoder(net.layers[0](net.encoder(torch.ones(4, 5)))).sum().backward()
        made.step()
        schedule.step()
    return {"net": net.state_dict(), "optimizer": made.state_dict(), "sched": schedule.state_dict()}


def random_states() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }


def twice_from_numpy() -> list[torch.Tensor]:
    array = np.arange(9.0)
    return [torch.from_numpy(array), torch.from_numpy(array)]


def sparse_uncoalesced() -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 0, 2], [1, 1, 0]], [1.0, 2.0, 3.0], (3, 4))


def per_channel() -> torch.Tensor:
    scales, zeros = torch.tensor([0.1, 0.25]), torch.tensor([3, 5])
    return torch.quantize_per_channel(count(10).reshape(5, 2), scales, zeros, 1, torch.quint8)


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), count(12).reshape(4, 3)], layout=layout)


@dataclasses.dataclass(frozen=True)
class Case:
    """One object to save.

    `trusted`: the globals that weights_only needs beyond torch's own; None where none suffice.
    """

    name: str
    make: Callable[[], Any]
    trusted: tuple[Any, ...] | None = ()

    def __str__(self) -> str:
        return self.name


NUMPY_GLOBALS = (
    np.ndarray.__reduce__(np.empty(0))[0],
    np.float64(0).__reduce__()[0],
    np.ndarray,
    np.dtype,
    *(type(np.dtype(code)) for code in ("f8", "i8", "u4", "?", "f2")),
)
NESTED = () if torch.__version__ < (2, 15) else None  # torch refuses even what it saved itself
EVERY_DTYPE = sorted(
    {
        str(dtype).removeprefix("torch.")
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not dtype.is_complex
    }
    # Without a storage type that torch could save, quantized (made otherwise below), or not bytes.
    - {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    - {"bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "bool"}
    - {"qint8", "qint32", "quint8", "quint4x2", "quint2x4"}
)

CASES = [
    *(
        Case(f"dtype {name}", lambda name=name: bit_patterns(getattr(torch, name)))
        for name in EVERY_DTYPE
    ),
    Case("dtype bool", lambda: torch.tensor([True, False, True])),
    Case("dtype complex32", lambda: count(6).to(torch.complex32)),
    Case("dtype complex64", lambda: torch.complex(count(6), -count(6))),
    Case("dtype complex128", lambda: torch.complex(count(6).double(), count(6).double())),
    Case("nan and inf", lambda: torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])),
    Case("scalar tensor", lambda: torch.tensor(3.5)),
    Case("empty", lambda: torch.empty(0)),
    Case(
        "empty shaped", lambda: {"a": torch.empty(0, 3), "b": torch.empty(2, 0, 4), "c": count(2)}
    ),
    Case(
        "freed", lambda: [count(5), torch.empty(0).set_(torch.UntypedStorage(64)).untyped_storage()]
    ),
    Case("shared memory", lambda: octets_of(70_000).share_memory_()),
    Case("inference tensor", torch.inference_mode()(lambda: count(6))),
    Case("empty view of data", lambda: [count(10)[4:4], count(0, torch.int64)]),
    Case("tied weights", tied),
    Case("one tensor twice", lambda: [count(4)] * 3),
    Case("small view of a big storage", lambda: count(300_000)[1000:1010]),
    Case("overlapping slices", overlapping),
    Case("transposed", lambda: count(24).reshape(2, 3, 4).permute(2, 0, 1)),
    Case("expanded", lambda: torch.ones(1).expand(5)),
    Case("strided with offset", lambda: count(64).as_strided((3, 4), (16, 2), 5)),
    Case(
        "channels last", lambda: count(48).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last)
    ),
    Case("view past the end of a resized base", lambda: count(8).resize_(3)),
    Case("same bytes, two storages", twice_from_numpy),
    Case("conjugate", lambda: torch.complex(count(3), count(3)).conj()),
    Case("negative view", lambda: torch.complex(count(3), count(3)).conj().imag),
    Case("negative", lambda: torch._neg_view(count(4))),
    Case("meta", lambda: torch.empty_strided((3, 4), (1, 3), dtype=torch.bfloat16, device="meta")),
    Case("meta beside data", lambda: [torch.empty(5, device="meta"), count(5)]),
    Case("requires grad", lambda: count(4).requires_grad_()),
    Case("not a leaf", lambda: count(4).requires_grad_() * 2),
    Case("parameter", lambda: torch.nn.Parameter(count(4))),
    Case(
        "frozen parameter", lambda: torch.nn.Parameter(count(4, torch.int32), requires_grad=False)
    ),
    Case(
        "parameter with attributes", lambda: attributed(torch.nn.Parameter(count(4)), shard=(1, 2))
    ),
    Case("uninitialized parameter", lambda: torch.nn.UninitializedParameter(), trusted=None),
    Case("tensor with attributes", lambda: attributed(count(4), note="x", twin=count(3))),
    Case("subclass", lambda: attributed(count(4).as_subclass(Tagged), tag=[1, 2]), (Tagged,)),
    Case("wrapper subclass", lambda: [Scaled(count(4)), count(2)], (Scaled,)),
    Case("sparse coo", lambda: torch.eye(3).to_sparse()),
    Case("sparse coo uncoalesced", sparse_uncoalesced),
    Case("sparse coo hybrid", lambda: count(12).reshape(3, 4).to_sparse(1)),
    Case("sparse csr", lambda: torch.eye(4).to_sparse_csr()),
    Case("sparse csc", lambda: torch.eye(4).to_sparse_csc()),
    Case("sparse bsr", lambda: torch.eye(4).to_sparse_bsr((2, 2))),
    Case("sparse bsc", lambda: torch.eye(4).to_sparse_bsc((2, 2))),
    Case("quantized", lambda: torch.quantize_per_tensor(count(7), 0.5, 3, torch.qint8)),
    Case("quantized qint32", lambda: torch.quantize_per_tensor(count(7), 0.5, 0, torch.qint32)),
    Case("quantized 4 bits", lambda: torch.quantize_per_tensor(count(7), 0.5, 3, torch.quint4x2)),
    Case("quantized per channel", per_channel),
    Case("nested", lambda: nested(torch.strided), NESTED),
    Case("nested jagged", lambda: nested(torch.jagged), NESTED),
    Case("untyped storage", lambda: count(5).untyped_storage()),
    Case("typed storage", lambda: count(5, torch.float16).storage()),
    Case("storage beside its tensor", lambda: (lambda t: [t, t.storage()])(count(5))),
    Case("block edges", lambda: [octets_of(BLOCK + step) for step in (-1, 0, 1)]),
    Case(
        "sector edges", lambda: [octets_of(n) for n in (1, 511, 512, 513, 4095, 4096, 4097, 65537)]
    ),
    Case("shape, dtype, device", lambda: [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")]),
    Case("generator", lambda: torch.Generator().manual_seed(7), trusted=None),
    Case("None", lambda: None),
    Case(
        "scalars",
        lambda: {"i": 2**200, "f": float("nan"), "c": 1j, "s": "\u00fc\ud800", "b": b"\0"},
    ),
    Case("nothing but text", lambda: "x" * 100_000),
    Case("containers", lambda: {(1, 2): [count(2)], "set": {1, 2}, None: (count(2), [True])}),
    Case("cyclic", cyclic),
    Case("deeply nested", lambda: [[[[[[[[[[count(1)]]]]]]]]]]),
    Case("ordered dict", lambda: collections.OrderedDict(b=count(2), a=count(3))),
    Case("counter", lambda: collections.Counter("abracadabra")),
    Case("default dict", lambda: collections.defaultdict(list, a=[count(2)]), trusted=None),
    Case("state dict with metadata", lambda: Net().state_dict()),
    Case("adam", lambda: trained("Adam")),
    Case("sgd", lambda: trained("SGD")),
    Case("module", Net, trusted=None),
    Case(
        "sequential",
        lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2), torch.nn.GELU()),
        trusted=None,
    ),
    Case("function", lambda: {"act": torch.nn.functional.relu, "hook": forward_hook}, trusted=None),
    Case("class", lambda: [torch.nn.Linear, Record], trusted=None),
    Case(
        "numpy array", lambda: {"a": np.arange(6.0).reshape(2, 3).T, "t": count(2)}, NUMPY_GLOBALS
    ),
    Case("numpy scalar", lambda: [np.float64(1.5), np.int64(-3), np.uint32(7)], NUMPY_GLOBALS),
    Case("numpy big", lambda: np.arange(500_000.0), trusted=None),
    Case("random states", random_states, NUMPY_GLOBALS),
    Case("named tuple", lambda: Pair(count(2), "right"), trusted=None),
    Case("data class", lambda: Record(count(3), [1, 2]), (Record,)),
    Case("slots", lambda: Slotted(count(3)), trusted=None),
    Case("arguments", lambda: argparse.Namespace(lr=0.1, init=count(2)), (argparse.Namespace,)),
    Case("path", lambda: pathlib.PurePosixPath("/some/where"), trusted=None),
    Case("enum", lambda: inspect.Parameter.VAR_KEYWORD, trusted=None),
    Case("many tensors", lambda: {f"layer.{i}": count(i % 70) for i in range(700)}),
]

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def archive(path: Path) -> dict[str, bytes]:
    """The records of a checkpoint, without the folder that they all lie in."""
    with zipfile.ZipFile(path) as opened:
        return {name.split("/", 1)[1]: opened.read(name) for name in opened.namelist()}


def data_offsets(path: Path) -> dict[str, int]:
    """Where the bytes of each data record begin, read from the local headers."""
    offsets = {}
    with zipfile.ZipFile(path) as opened, path.open("rb") as raw:
        for info in opened.infolist():
            raw.seek(info.header_offset)
            header = raw.read(LOCAL_HEADER_BYTES)
            extra = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
            name = info.filename.split("/", 1)[1]
            if name.startswith("data/"):
                offsets[name] = info.header_offset + LOCAL_HEADER_BYTES + extra
    return offsets


def saved_by_torch(obj: Any, path: Path) -> Path:
    torch.save(obj, path)
    return path


@contextlib.contextmanager
def trusting(case: Case) -> Iterator[None]:
    with torch.serialization.safe_globals(list(case.trusted or ())):
        yield


# Every kind of object, in every direction.


@pytest.mark.filterwarnings("ignore")
@every_case
def test_what_is_saved_comes_back(case: Case, disk: Path, committed: Any, assert_same: Any) -> None:
    obj = case.make()
    ours, theirs = committed(obj, disk / "ours.pt"), saved_by_torch(obj, disk / "theirs.pt")
    for weights_only in (True, False) if case.trusted is not None else (False,):
        with trusting(case):
            assert_same(torch.load(ours, weights_only=weights_only), obj)
            assert_same(fastckpt.load(ours, weights_only=weights_only), obj)
            assert_same(fastckpt.load(theirs, weights_only=weights_only), obj)


@pytest.mark.filterwarnings("ignore")
@every_case
def test_torch_maps_our_file_and_computes_its_offsets(
    case: Case, disk: Path, committed: Any, assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    obj = case.make()
    path = committed(obj, disk / "object.pt")
    assert_same(torch.load(path, mmap=True, weights_only=False), obj)
    if torch_config is None:
        return  # this torch computes no offsets
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")  # torch checks each computed offset
    with torch_config.patch({"load.calculate_storage_offsets": True}):
        assert_same(torch.load(path, mmap=True, weights_only=False), obj)
    assert_same(torch.load(path, weights_only=False), obj)


@pytest.mark.filterwarnings("ignore")
@every_case
def test_file_is_a_sound_zip_with_aligned_data(case: Case, disk: Path, committed: Any) -> None:
    path = committed(case.make(), disk / "object.pt")
    with zipfile.ZipFile(path) as opened:
        assert opened.testzip() is None
        names = opened.namelist()
        assert len(set(names)) == len(names)
        assert len({name.split("/", 1)[0] for name in names}) == 1
        assert all(info.compress_type == zipfile.ZIP_STORED for info in opened.infolist())
    alignment = int(archive(path).get(".storage_alignment", b"64"))
    assert alignment in (64, 4096)
    offsets = data_offsets(path)
    assert all(offset % alignment == 0 for offset in offsets.values()), offsets
    assert set(offsets) == {f"data/{key}" for key in range(len(offsets))}


def test_state_made_while_pickling_is_kept_until_it_is_written(disk: Path, committed: Any) -> None:
    path = committed([Fleeting(size) for size in range(1, 300)], disk / "fleeting.pt")
    for loaded in (torch.load(path, weights_only=False), fastckpt.load(path, weights_only=False)):
        assert [(each.size, len(each.made)) for each in loaded] == [(n, n) for n in range(1, 300)]
        assert all(bool((each.made == each.size).all()) for each in loaded)


def test_save_within_a_save(disk: Path, committed: Any) -> None:
    path = committed([count(5), SavesInside(count(9))], disk / "outer.pt")
    outer, inside = fastckpt.load(path, weights_only=False)
    assert torch.equal(outer, count(5)) and torch.equal(inside.inner, count(9))


OPTIONS: dict[str, dict[str, Any]] = {
    "step fence": {"fence": "step"},
    "threads": {"backend": "threads"},
    "not durable": {"durable": False},
    "one block": {"staging_bytes": 1},
}


@pytest.mark.filterwarnings("ignore")
@every_case
def test_options_do_not_change_a_byte(case: Case, disk: Path, committed: Any) -> None:
    """All of them at once; what they are for each alone, one case shows."""
    obj = case.make()
    path = disk / "object.pt"
    plain = committed(obj, path).read_bytes()
    ways = {"all": {name: value for each in OPTIONS.values() for name, value in each.items()}}
    for name, options in (OPTIONS | ways if str(case) == "many tensors" else ways).items():
        assert committed(obj, path, **options).read_bytes() == plain, name


# The arguments.


def test_signature_begins_with_that_of_torch() -> None:
    def parameters(function: Any) -> list[tuple[str, Any, Any]]:
        listed = inspect.signature(function).parameters.values()
        return [(each.name, each.kind, each.default) for each in listed]

    ours, theirs = parameters(fastckpt.save), parameters(torch.save)
    assert ours[: len(theirs)] == theirs
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in ours[len(theirs) :])
    assert all(default is not inspect.Parameter.empty for *_, default in ours[len(theirs) :])
    ours, theirs = parameters(fastckpt.load), parameters(torch.load)
    assert [each for each in ours if each in theirs] == theirs
    assert ours[:3] == theirs[:3]


@pytest.mark.parametrize("protocol", [-1, 1, 2, 3, 4, 5])
def test_pickle_protocol(protocol: int, disk: Path, committed: Any, assert_same: Any) -> None:
    obj = {"a": count(5), "b": ["text" * 100, torch.nn.Parameter(count(3))]}
    path = committed(obj, disk / "object.pt", pickle_protocol=protocol)
    torch.save(obj, disk / "torch.pt", pickle_protocol=protocol)
    ours, theirs = (operations(archive(of)["data.pkl"]) for of in (path, disk / "torch.pt"))
    assert ours == theirs
    for load in (torch.load, fastckpt.load):
        assert_same(load(path, weights_only=False), obj)


class Shouting(pickle._Pickler):
    """A pickler in Python, with reducers and an override of its own, as dill has."""

    dispatch_table = {Slotted: lambda slotted: (Slotted, (slotted.weight * 2,))}  # noqa: RUF012

    def save_str(self, obj: str) -> None:
        pickle._Pickler.save_str(self, obj.replace("text", "TEXT"))

    dispatch = {**pickle._Pickler.dispatch, str: save_str}  # noqa: RUF012


class Overriding(pickle.Pickler):
    """Decides for itself what becomes of tensors and of others, as cloudpickle does."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Slotted):
            return Slotted, (obj.weight * 2,)
        if isinstance(obj, torch.Tensor) and obj.dim() == 0:
            return float, (obj.item(),)
        return NotImplemented


PICKLE_MODULES = {
    "reducers": types.SimpleNamespace(__name__="overriding", Pickler=Overriding),
    "pickle": pickle,
    "python": types.SimpleNamespace(__name__="python_pickle", Pickler=pickle._Pickler),
    "override": types.SimpleNamespace(__name__="shouting", Pickler=Shouting),
}


@pytest.mark.parametrize("fence", ["call", "step"])
@pytest.mark.parametrize("name", PICKLE_MODULES)
def test_pickle_module(name: str, fence: str, disk: Path, committed: Any) -> None:
    module = PICKLE_MODULES[name]
    obj = ["text", Slotted(count(4)), count(4), torch.tensor(2.5)]
    path = committed(obj, disk / "object.pt", module, 4, fence=fence)
    torch.save(obj, disk / "torch.pt", module, 4)
    ours, theirs = (operations(archive(of)["data.pkl"]) for of in (path, disk / "torch.pt"))
    assert ours == theirs
    for load in (torch.load, fastckpt.load):
        text, slotted, plain, scalar = load(path, weights_only=False)
        assert text == ("TEXT" if name == "override" else "text")
        doubled = name in ("override", "reducers")
        assert torch.equal(slotted.weight, count(4) * (2 if doubled else 1))
        assert torch.equal(plain, count(4))
        assert type(scalar) is (float if name == "reducers" else torch.Tensor) and scalar == 2.5


def test_legacy_format(disk: Path, committed: Any, assert_same: Any) -> None:
    obj = tied()
    path = committed(obj, disk / "ours.pt", pickle, 2, False)
    torch.save(obj, disk / "torch.pt", pickle, 2, False)
    assert path.read_bytes() == (disk / "torch.pt").read_bytes()
    assert not zipfile.is_zipfile(path)
    for load in (torch.load, fastckpt.load):
        assert_same(load(path), obj)


def test_byteorder_record_can_be_left_out(disk: Path, committed: Any, assert_same: Any) -> None:
    obj = tied()
    path = committed(obj, disk / "ours.pt", pickle, 2, True, True)
    torch.save(obj, disk / "torch.pt", pickle, 2, True, True)
    records = [name for name in archive(path) if name not in OWN_RECORDS]
    assert records == list(archive(disk / "torch.pt"))
    for load in (torch.load, fastckpt.load):
        assert_same(load(path), obj)


# What torch can be told about its files.


@needs_config
@pytest.mark.parametrize("alignment", [1, 16, 64, 100, 256, 4096, 65536])
def test_storage_alignment_that_torch_is_configured_for(
    alignment: int, disk: Path, committed: Any, assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    obj = [count(size) for size in (1, 70, 0, 2000, 5)]
    with torch_config.patch({"save.storage_alignment": alignment}):
        path = committed(obj, disk / "object.pt")
    written = int(archive(path)[".storage_alignment"])
    assert written == alignment or alignment == 64  # 64 is also what nobody asked for
    assert all(offset % written == 0 for offset in data_offsets(path).values())
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    with torch_config.patch({"load.calculate_storage_offsets": True}):
        assert_same(torch.load(path, mmap=True), obj)
    assert_same(fastckpt.load(path), obj)


@pytest.mark.parametrize("compute", [True, False])
def test_crc_option(compute: bool, disk: Path, committed: Any, assert_same: Any) -> None:
    obj = tied()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(compute)
    try:
        path = committed(obj, disk / "object.pt")
        assert_same(torch.load(path), obj)
        assert_same(fastckpt.load(path), obj)
    finally:
        torch.serialization.set_crc32_options(before)
    assert_same(torch.load(path), obj)
    assert_same(fastckpt.load(path), obj)


@needs_config
def test_skip_data(disk: Path, committed: Any) -> None:
    obj = {"a": count(300), "b": count(20_000).reshape(2, 10_000)}
    path = committed(obj, disk / "object.pt")
    with torch.serialization.skip_data():
        for load in (torch.load, fastckpt.load):
            assert [tensor.shape for tensor in load(path).values()] == [(300,), (2, 10_000)]
        holes = committed(obj, disk / "holes.pt")
    assert abs(holes.stat().st_size - path.stat().st_size) < 64 * 1024
    loaded = torch.load(holes)
    assert all(not tensor.any() for tensor in loaded.values())
    offsets = torch.load(holes, map_location="meta")
    with holes.open("r+b") as raw:  # the other half of the deal: bytes written where torch says
        for name, tensor in obj.items():
            raw.seek(offsets[name].untyped_storage()._checkpoint_offset)
            raw.write(bytes(tensor.untyped_storage()))
    assert all(torch.equal(tensor, obj[name]) for name, tensor in torch.load(holes).items())


def test_what_a_load_will_refuse_is_warned_of_once(
    disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_plan, "_met", set())
    for state in (
        {
            "w": torch.ones(3),
            "n": {"l": [1, "a", None]},
            "s": {1},
            "o": collections.OrderedDict(a=1),
        },
        {"a": [Slotted(torch.ones(3))]},
        {"b": Slotted(torch.ones(3))},
    ):
        fastckpt.save(state, disk / "a.pt").result()
    told = [each for each in caplog.records if "weights_only" in each.getMessage()]
    assert [each.levelname for each in told] == ["WARNING"]
    assert f"loading 'a/0' (made with {__name__}.Slotted) needs" in told[0].getMessage()


@pytest.mark.parametrize("value", ["scalar", "array"])
def test_values_of_numpy_that_a_load_will_refuse_are_warned_of(
    value: str, disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy = pytest.importorskip("numpy")
    monkeypatch.setattr(files_plan, "_met", set())
    made = {"scalar": numpy.float64(0.5), "array": numpy.arange(3)}[value]
    fastckpt.save({"w": torch.ones(3), "best": [made]}, disk / "a.pt").result()
    with pytest.raises(pickle.UnpicklingError):
        fastckpt.load(disk / "a.pt")
    (told,) = [each for each in caplog.records if "weights_only" in each.getMessage()]
    assert told.levelname == "WARNING" and "loading 'best/0' (made with " in told.getMessage()
    caplog.clear()
    makers = [numpy.dtype, type(numpy.dtype("f8")), type(numpy.dtype("i8")), numpy.ndarray]
    makers += [made.__reduce__()[0]]
    with torch.serialization.safe_globals(makers):
        monkeypatch.setattr(files_plan, "_met", set())
        fastckpt.save([made], disk / "a.pt").result()
        assert (fastckpt.load(disk / "a.pt")[0] == made).all()
    assert not caplog.records


def test_unsafe_globals_are_those_of_torch(disk: Path, committed: Any) -> None:
    obj = {"n": argparse.Namespace(a=1), "r": Record(count(2), []), "c": collections.Counter("a")}
    ours = torch.serialization.get_unsafe_globals_in_checkpoint(committed(obj, disk / "ours.pt"))
    theirs = torch.serialization.get_unsafe_globals_in_checkpoint(
        saved_by_torch(obj, disk / "torch.pt")
    )
    assert sorted(ours) == sorted(theirs) and len(ours) == 2


def test_registered_location_is_tagged_and_restored(
    disk: Path, committed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
        if location != "vault":
            return None
        seen.append(location)
        return storage

    registry = torch.serialization._package_registry
    monkeypatch.setattr(torch.serialization, "_package_registry", list(registry))
    torch.serialization.register_package(1, lambda storage: "vault", restore)
    path = committed([count(3), count(4)], disk / "object.pt")
    torch.load(path)
    fastckpt.load(path)
    assert seen == ["vault"] * 4


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "meta device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "double by default": lambda: default_dtype(torch.float64),
}


@pytest.mark.parametrize("mode", MODES)
def test_torch_modes_do_not_reach_into_a_save_or_load(
    mode: str, disk: Path, committed: Any, assert_same: Any
) -> None:
    obj = {"a": torch.nn.Parameter(count(50)), "b": octets_of(100_000), "c": count(3).half()}
    with MODES[mode]():
        path = committed(obj, disk / "object.pt")
        loaded = fastckpt.load(path)
    assert_same(torch.load(path), obj)
    assert_same(loaded, obj)


# Where a checkpoint can be written to.


class PathLike:
    def __init__(self, path: str) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return self._path


class TextPath(str):
    """A string that is more than one, as configuration libraries hand out."""

    __slots__ = ()


NAMES = [
    "a.pt",
    "no_extension",
    ".hidden.pt",
    "a.b.c.pt",
    "sp ace.pt",
    "trailing.",
    "-dash.pt",
    "quo'te\".pt",
    "new\nline.pt",
    "%s{0}.pt",
    "\u00fcn\u00ef-\u65e5\u672c.pt",
    os.fsdecode(b"\xff\xfe.pt"),
    "x" * 252 + ".pt",
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_file_names(name: str, disk: Path, committed: Any, assert_same: Any) -> None:
    obj = tied()
    path = committed(obj, disk / name)
    assert os.listdir(disk) == [name]
    assert_same(torch.load(path), obj)
    assert_same(fastckpt.load(path), obj)


def test_file_does_not_depend_on_its_name(disk: Path, committed: Any) -> None:
    """The folder in the zip is the one torch uses for streams, not the stem of the path."""
    contents = {committed(count(2), disk / name).read_bytes() for name in ("a.pt", "b.c", "\u00fc")}
    assert len(contents) == 1
    with zipfile.ZipFile(disk / "a.pt") as opened:
        assert all(name.startswith("archive/") for name in opened.namelist())


@pytest.mark.parametrize("kind", [str, Path, PathLike, TextPath])
def test_kinds_of_path(kind: Any, disk: Path, committed: Any, assert_same: Any) -> None:
    obj = tied()
    path = disk / "object.pt"
    committed(obj, kind(str(path)))
    assert_same(torch.load(path), obj)
    assert_same(fastckpt.load(kind(str(path))), obj)


def test_relative_path_is_that_of_the_call(
    disk: Path, assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    obj = tied()
    for name in ("here", "elsewhere"):
        (disk / name).mkdir()
    monkeypatch.chdir(disk / "here")
    handles = [fastckpt.save(obj, "object.pt"), fastckpt.save(obj, "../up.pt")]
    monkeypatch.chdir(disk / "elsewhere")
    for handle in handles:
        handle.result(timeout=60)
    assert_same(torch.load(disk / "here" / "object.pt"), obj)
    assert_same(torch.load(disk / "up.pt"), obj)
    assert sorted(os.listdir(disk / "here")) == ["object.pt"]
    assert os.listdir(disk / "elsewhere") == []


@pytest.mark.parametrize("target", ["there", "missing"])
@pytest.mark.parametrize("hops", [1, 3])
def test_symlink_is_written_through(
    target: str, hops: int, disk: Path, committed: Any, assert_same: Any
) -> None:
    obj = tied()
    (disk / "far").mkdir()
    end = disk / "far" / "target.pt"
    if target == "there":
        end.write_bytes(b"old")
    names = [f"link{hop}.pt" for hop in range(hops)] + ["far/target.pt"]
    for name, to in itertools.pairwise(names):
        (disk / name).symlink_to(to)  # relative to the link
    committed(obj, disk / "link0.pt")
    assert all((disk / name).is_symlink() for name in names[:-1])
    assert end.is_file() and not end.is_symlink()
    assert os.listdir(disk / "far") == ["target.pt"]
    assert_same(torch.load(disk / "link0.pt"), obj)
    assert_same(fastckpt.load(end), obj)


def test_directory_behind_a_symlink(disk: Path, committed: Any, assert_same: Any) -> None:
    (disk / "real").mkdir()
    (disk / "link").symlink_to("real")
    committed(tied(), disk / "link" / "object.pt")
    assert_same(fastckpt.load(disk / "real" / "object.pt"), tied())


@pytest.mark.parametrize("kind", ["pipe", "unlinked"])
def test_path_of_a_descriptor(kind: str, disk: Path, committed: Any, assert_same: Any) -> None:
    obj = tied()
    if kind == "pipe":  # small enough for the pipe to hold it all
        read_end, fd = os.pipe()
        committed(obj, f"/dev/fd/{fd}")
        os.close(fd)
        with os.fdopen(read_end, "rb") as pipe:
            assert_same(torch.load(io.BytesIO(pipe.read())), obj)
        return
    fd = os.open(disk / "gone.pt", os.O_RDWR | os.O_CREAT)
    (disk / "gone.pt").unlink()
    committed(obj, f"/proc/self/fd/{fd}")
    with os.fdopen(fd, "rb") as file:
        assert_same(torch.load(file), obj)
    assert os.listdir(disk) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_file_that_may_be_written_in_a_folder_that_may_not(disk: Path, assert_same: Any) -> None:
    """An atomic commit needs the folder: refused, and the file keeps its content."""
    path = saved_by_torch(tied(), disk / "object.pt")
    path.chmod(0o666)
    disk.chmod(0o555)
    above = disk.parent
    modes = []
    while above != above.parent:  # so that the other user gets here at all
        modes.append((above, stat.S_IMODE(above.stat().st_mode)))
        above.chmod(modes[-1][1] | 0o011)
        above = above.parent
    os.seteuid(65534)
    try:
        error = fastckpt.save(count(2), path).exception(timeout=60)
    finally:
        os.seteuid(0)
        for above, mode in modes:
            above.chmod(mode)
    assert isinstance(error, fastckpt.StorageError) and error.errno == errno.EACCES
    assert_same(torch.load(path), tied())


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_file_in_memory(committed: Any, assert_same: Any) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = committed(tied() | {"big": octets_of(9 * MIB)}, Path(folder) / "object.pt")
        for load in (torch.load, fastckpt.load):
            assert_same(load(path), tied() | {"big": octets_of(9 * MIB)})
        assert os.listdir(folder) == ["object.pt"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_mode_of_a_new_file(umask: int, disk: Path, committed: Any) -> None:
    before = os.umask(umask)
    try:
        ours = committed(count(3), disk / "ours.pt")
        theirs = saved_by_torch(count(3), disk / "torch.pt")
    finally:
        os.umask(before)
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(theirs.stat().st_mode)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o777])
def test_mode_of_an_existing_file_stays(mode: int, disk: Path, committed: Any) -> None:
    path = disk / "object.pt"
    path.touch()
    path.chmod(mode)
    committed(count(3), path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert torch.equal(torch.load(path), count(3))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away, which root alone may")
def test_owner_of_an_existing_file_stays(disk: Path, committed: Any) -> None:
    path = disk / "object.pt"
    path.touch()
    os.chown(path, 1234, 4321)
    committed(count(3), path)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 4321)


def test_device_file_is_written_to_and_stays_one(disk: Path, committed: Any) -> None:
    null = Path("/dev/null")
    if os.geteuid() == 0:  # who could replace the real one
        null = disk / "null"
        os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    committed({"a": octets_of(3 * MIB)}, null)
    assert stat.S_ISCHR(null.stat().st_mode)
    assert null.stat().st_rdev == os.makedev(1, 3)
    if null.parent == disk:
        assert os.listdir(disk) == ["null"]


def test_fifo_is_written_to_and_stays_one(disk: Path, committed: Any, assert_same: Any) -> None:
    fifo = disk / "fifo"
    os.mkfifo(fifo)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(fifo.read_bytes()), daemon=True)
    reader.start()
    obj = {"a": octets_of(3 * MIB), "b": count(7)}
    committed(obj, fifo)
    assert stat.S_ISFIFO(fifo.stat().st_mode), "a file lies where the fifo was"
    reader.join(timeout=60)
    assert_same(torch.load(io.BytesIO(received[0])), obj)


# Objects with a write method instead of a path.


class Sink:
    """Can be written to and flushed, and nothing else."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.flushes = 0

    def write(self, chunk: Any) -> int:
        self.written += bytes(chunk)
        return len(bytes(chunk))

    def flush(self) -> None:
        self.flushes += 1


@pytest.mark.parametrize("size", [5, 3 * MIB])
def test_file_likes_hold_everything_on_return(size: int, disk: Path, assert_same: Any) -> None:
    obj = {"a": octets_of(size), "b": torch.nn.Parameter(count(5))}
    theirs, ours, sink = io.BytesIO(), io.BytesIO(), Sink()
    torch.save(obj, theirs)
    handles = [fastckpt.save(obj, ours), fastckpt.save(obj, sink)]
    assert ours.getvalue() == theirs.getvalue() == bytes(sink.written)
    assert ours.tell() == theirs.tell()
    assert sink.flushes > 0
    assert all(handle.done() and handle.exception() is None for handle in handles)
    assert_same(torch.load(io.BytesIO(sink.written)), obj)


@pytest.mark.parametrize("opened", ["buffered", "unbuffered", "appending", "gzip", "pipe"])
def test_open_files(opened: str, disk: Path, assert_same: Any) -> None:
    obj = {"a": octets_of(100_001), "b": count(5)}
    path = disk / "object"
    if opened == "pipe":
        read_end, write_end = os.pipe()
        copier = threading.Thread(
            target=lambda: path.write_bytes(os.fdopen(read_end, "rb").read()), daemon=True
        )
        copier.start()
        with os.fdopen(write_end, "wb") as file:
            fastckpt.save(obj, file)
            assert not file.closed
        copier.join(timeout=60)
    elif opened == "gzip":
        with gzip.open(path, "wb") as file:
            fastckpt.save(obj, file)
        path.write_bytes(gzip.decompress(path.read_bytes()))
    else:
        mode = "ab" if opened == "appending" else "wb"
        with path.open(mode, buffering=0 if opened == "unbuffered" else -1) as file:
            fastckpt.save(obj, file)
            assert not file.closed
            assert_same(torch.load(path), obj)  # flushed, so that others see it already
            assert file.tell() == path.stat().st_size
    assert_same(torch.load(path), obj)


def test_open_file_that_already_holds_something(disk: Path, assert_same: Any) -> None:
    path = disk / "object"
    with path.open("w+b") as file:
        file.write(b"preamble")
        fastckpt.save(tied(), file)
        file.seek(len(b"preamble"))
        assert_same(torch.load(file), tied())
    assert path.read_bytes().startswith(b"preamble")


# What a caller may do around a save.


def test_checkpoint_mapped_from_the_path_that_is_saved_to(disk: Path, assert_same: Any) -> None:
    obj = {"a": octets_of(10 * MIB), "b": count(5)}
    path = disk / "object.pt"
    fastckpt.save(obj, path).result(timeout=60)
    mapped = torch.load(path, mmap=True)
    for _ in range(3):
        fastckpt.save(mapped, path).result(timeout=60)
    assert_same(mapped, obj)
    assert_same(torch.load(path), obj)


# Scale.


@pytest.mark.torture
def test_hundred_thousand_small_tensors(disk: Path, committed: Any) -> None:
    obj = {f"k{n}": torch.full((3,), float(n)) for n in range(100_000)}
    path = committed(obj, disk / "object.pt")
    (disk / "torch").mkdir()
    theirs = saved_by_torch(obj, disk / "torch" / "object.pt")
    assert path.stat().st_size <= 1.05 * theirs.stat().st_size + MIB
    ours = fastckpt.load(path)
    for loaded in (ours, torch.load(path, mmap=True)):
        assert len(loaded) == len(obj)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in obj.items())
    with zipfile.ZipFile(path) as opened:  # more than 65535 records: the zip64 end of the directory
        assert opened.testzip() is None


def check_marks(huge: torch.Tensor, after: torch.Tensor) -> None:
    for at in marks(len(huge)):
        assert huge[at] == at % 250 + 1, at
    assert torch.equal(after, count(1000))


def marks(size: int) -> list[int]:
    return [0, 4095, 4096, BLOCK - 1, BLOCK, GIB, 4 * GIB - 1, 4 * GIB, 4 * GIB + 1, size - 1]


@needs_config
@pytest.mark.torture
@pytest.mark.timeout(900)
def test_more_than_four_gibibytes(
    disk: Path, committed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4 * GIB + GIB // 2 + 12_345
    if shutil.disk_usage(disk).free < 15 * GIB:
        pytest.skip("less than 15 GiB free")
    with (disk / "source").open("wb") as source:
        source.truncate(size)  # a hole: costs no disk
    storage = torch.UntypedStorage.from_file(str(disk / "source"), False, size)
    huge = torch.empty(0, dtype=torch.uint8).set_(storage)
    for at in marks(size):
        huge[at] = at % 250 + 1
    path = committed({"before": count(3), "huge": huge, "after": count(1000)}, disk / "object.pt")
    with zipfile.ZipFile(path) as opened:
        sizes = {info.filename.split("/", 1)[1]: info for info in opened.infolist()}
        assert sizes["data/1"].file_size == size
        assert sizes["data/2"].header_offset > 4 * GIB
        assert opened.read(sizes["data/2"]) == bytes(count(1000).untyped_storage())
    offsets = data_offsets(path)
    meta = torch.load(path, map_location="meta")
    assert meta["after"].untyped_storage()._checkpoint_offset == offsets["data/2"]
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    with torch_config.patch({"load.calculate_storage_offsets": True}):
        loaded = torch.load(path, mmap=True)
    check_marks(loaded["huge"], loaded["after"])
    del loaded
    loaded = fastckpt.load(path)
    check_marks(loaded["huge"], loaded["after"])
    assert np.count_nonzero(loaded["huge"].numpy()) == len(marks(size))


def test_little_endian_is_recorded(disk: Path, committed: Any) -> None:
    assert archive(committed(count(2), disk / "object.pt"))["byteorder"] == sys.byteorder.encode()


def test_fastckpt_in_the_place_of_torch(
    disk: Path, assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.save, torch.load = fastckpt.save, fastckpt.load`, taken literally."""
    state = {"w": count(1000), "n": 3}
    monkeypatch.setattr(torch, "save", fastckpt.save)
    monkeypatch.setattr(torch, "load", fastckpt.load)
    torch.save(state, disk / "a.pt").result()
    assert_same(torch.load(disk / "a.pt", weights_only=False), state)
    torch.save(state, disk / "old.pt", _use_new_zipfile_serialization=False)
    assert_same(torch.load(disk / "old.pt", weights_only=False), state)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert_same(torch.load(buffer, weights_only=False), state)
    torch.save(state, disk / "own.pt", pickle_module=types.SimpleNamespace(**vars(pickle)))
    assert_same(torch.load(disk / "own.pt", weights_only=False), state)
    with fastckpt.Checkpointer(disk / "run") as run:
        run.save(1, {"w": state["w"], "own": fastckpt.PerRank([1])}).result()
        assert torch.equal(run.load()["w"], state["w"])
