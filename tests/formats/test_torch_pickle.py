"""What our pickler makes of objects is what torch.save makes of them."""

from __future__ import annotations

import copyreg
import gc
import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt.errors import CheckpointError
from fastckpt.formats import torch_pickle
from tests.kit.pickles import operations


def of_torch(obj: object) -> dict[str, bytes]:
    """The records of torch's own zip."""
    file = io.BytesIO()
    torch.save(obj, file)
    with zipfile.ZipFile(file) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def of_ours(obj: object, observe: bool) -> dict[str, bytes]:
    """The records that are to be laid out as a zip of ours."""
    captured = torch_pickle.capture(obj, pickle, 2, False, observe)
    return {
        name: content if isinstance(content, bytes) else bytes(content.tolist())
        for name, content in captured.records
    }


class Sub(torch.Tensor):
    """A subclass, which pickles in its own way."""


class Marked:
    """An object with a tensor and an attribute."""

    def __init__(self) -> None:
        self.weight = torch.arange(6.0)
        self.name = "marked"


def with_attribute() -> torch.Tensor:
    tensor = torch.zeros(3)
    tensor.note = "kept"  # type: ignore[attr-defined]
    return tensor


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0)
    return {"base": base, "half": base[12:], "t": base.view(4, 6).t(), "step": base[::3]}


def hooks_kept() -> OrderedDict[str, object]:
    named = OrderedDict(a=torch.zeros(2), b=OrderedDict())
    empty: OrderedDict[str, object] = OrderedDict()
    empty.note = "an attribute"  # type: ignore[attr-defined]
    return OrderedDict(named=named, empty=empty, again=named)


def with_hook() -> torch.Tensor:
    tensor = torch.ones(3, requires_grad=True)
    tensor.register_hook(lambda gradient: gradient)
    return tensor


def of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


ZOO: dict[str, Callable[[], Any]] = {
    "module": lambda: torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)
    ).state_dict(),
    "whole module": lambda: torch.nn.Linear(2, 2),
    "views of one storage": views,
    "one tensor twice": lambda: [tensor := torch.ones(5), tensor],
    "scalars and empty": lambda: [torch.tensor(1.5), torch.zeros(0), torch.zeros(2, 0, 3)],
    "requires grad": lambda: [torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))],
    "hook": with_hook,
    "inference": of_inference,
    "offset and strides": lambda: torch.arange(30.0).as_strided((2, 3), (7, 2), 4),
    "attribute": with_attribute,
    "attribute of an object": Marked,
    "subclass": lambda: torch.ones(3).as_subclass(Sub),
    "complex, conj, neg": lambda: [
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
    ],
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.empty(3, device="meta"),
    "storages": lambda: [torch.arange(4).untyped_storage(), torch.arange(4.0)],
    "ordered dicts": hooks_kept,
    "optimizer": lambda: {
        "state": {0: {"step": torch.tensor(1.0), "m": torch.randn(3, 3)}},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99), "params": [0]}],
    },
}
_DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.bool)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16)
ZOO |= {str(dtype): partial(torch.ones, 3, dtype=dtype) for dtype in (*_DTYPES, *_INTEGERS)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_records_are_torchs(name: str, observe: bool) -> None:
    obj = ZOO[name]()
    expected = of_torch(obj)
    for record, content in of_ours(obj, observe).items():
        if record == "data.pkl":
            assert operations(content) == operations(expected[record])
        else:
            assert content == expected[record], record


def tensors() -> list[Any]:
    """Tensors that share memory, are equal, or differ in what the pickle has of them."""
    base, weight = torch.arange(24.0), torch.ones(3, 300)
    return [
        *(base, base[12:], base.view(4, 6).t(), base.detach(), torch.arange(24.0)),
        *(weight, weight.requires_grad_(), torch.nn.Parameter(weight), torch.ones(3, 300)),
        *(torch.tensor(1), torch.tensor(1.0), torch.zeros(0), torch.zeros(2, 0, 3, 1, 1)),
        *(torch.ones(70000, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64).conj()),
        *(with_attribute(), with_hook(), of_inference(), torch.ones(3).as_subclass(Sub), Marked()),
        *(base.untyped_storage(), torch.FloatStorage(4), OrderedDict(), Ellipsis),
    ]


LEAVES = st.one_of(
    *(st.integers(0, 22), st.integers(), st.floats(), st.text(max_size=9), st.binary(max_size=9)),
    *(st.sampled_from([None, "cpu", "storage", "0", "1", torch.float32, OrderedDict]),),
)


NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(st.text(max_size=5), inner, max_size=6),
        st.dictionaries(st.text(max_size=5), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=40,
)


def with_tensors(nest: Any, pool: list[Any]) -> Any:
    """A nest with an object of the pool instead of each number below the pool's size."""
    if type(nest) in (list, tuple):
        return type(nest)(with_tensors(item, pool) for item in nest)
    if isinstance(nest, dict):
        return type(nest)((key, with_tensors(item, pool)) for key, item in nest.items())
    return pool[nest] if type(nest) is int and 0 <= nest < len(pool) else nest


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=40)
@given(NESTS, NESTS)
def test_nests_are_pickled_as_torch_pickles_them(first: Any, second: Any) -> None:
    """Whatever was pickled before, and however often a tensor occurs."""
    pool = tensors()
    begin, end = with_tensors(first, pool), with_tensors(second, pool)
    for obj in (begin, end, [begin, end, begin]):
        try:
            expected = of_torch(obj)
        except RuntimeError as error:  # one memory with two dtypes
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                of_ours(obj, True)
            continue
        ours = of_ours(obj, True)
        pickled = ours.pop("data.pkl")
        assert operations(pickled) == operations(expected["data.pkl"])
        assert ours.items() <= expected.items()


def test_other_nests_have_other_operations() -> None:
    """The comparison of the tests above sees what is one object, and what is only equal."""
    tensor, texts = torch.ones(2), ["a"]
    nests = [
        [tensor, tensor],
        [tensor, tensor.detach()],
        [tensor, torch.ones(2)],
        [texts, texts],
        [texts, ["a"]],
        [texts, ("a",)],
    ]
    found = [str(operations(of_ours(nest, False)["data.pkl"])) for nest in nests]
    assert len({*found}) == len(nests)


class Clearing:
    """Changes a tensor while it is pickled."""

    def __init__(self, tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> None:
        self.tensor, self.change = tensor, change

    def __reduce__(self) -> Any:
        self.change(self.tensor)
        return (str, ())


class Subclass(torch.Tensor):
    pass


def becomes(kind: type[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    def change(tensor: torch.Tensor) -> None:
        tensor.__class__ = kind

    return change


def swap(tensor: torch.Tensor) -> None:
    torch.utils.swap_tensors(tensor, torch.nn.Parameter(torch.zeros(3)))


@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        (with_attribute, lambda tensor: tensor.__dict__.clear()),
        (lambda: torch.ones(2), becomes(Subclass)),
        (lambda: torch.ones(2), becomes(torch.nn.Parameter)),
        (lambda: torch.ones(2).as_subclass(Subclass), becomes(torch.Tensor)),
        (lambda: torch.nn.Parameter(torch.ones(2)), becomes(torch.Tensor)),
        (lambda: torch.ones(2), swap),
    ],
    ids=["attributes", "to subclass", "to parameter", "of subclass", "of parameter", "swapped"],
)
def test_a_tensor_that_changes_while_it_is_pickled_stays_one_object(
    tensor: Callable[[], torch.Tensor], change: Callable[[torch.Tensor], None]
) -> None:
    def obj() -> list[Any]:
        one = tensor()
        return [one, Clearing(one, change), one]

    assert operations(of_ours(obj(), False)["data.pkl"]) == operations(of_torch(obj())["data.pkl"])


@pytest.mark.parametrize("observe", [False, True])
def test_a_storage_that_is_resized_while_it_is_pickled_is_refused(observe: bool) -> None:
    tensor = torch.ones(6)
    obj = [tensor, Clearing(tensor, lambda tensor: tensor.untyped_storage().resize_(0))]
    with pytest.raises(CheckpointError, match=r"storage of record data/0 has 0 bytes, but had 24"):
        of_ours(obj, observe)


def test_a_pickle_is_completed_once_and_frees_the_one_with_holes() -> None:
    captured = torch_pickle.capture([torch.ones(2), b"x" * 999], pickle, 2, False, False)
    assert captured.mentions(b"xxx")
    first = captured.records
    assert captured.records is first and not captured.mentions(b"xxx")
    captured.forget()
    assert not captured.records and not list(captured.storages())


def test_pauses_of_two_threads_leave_garbage_collection_enabled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One begins when the other one, which has seen it enabled, ends."""
    is_enabled = gc.isenabled

    def ended_meanwhile() -> bool:
        was_enabled = is_enabled()
        gc.enable()
        return was_enabled

    gc.disable()
    with monkeypatch.context() as patched:
        patched.setattr(gc, "isenabled", ended_meanwhile)
        with torch_pickle.collection_paused():
            pass
    was_enabled = gc.isenabled()
    gc.enable()
    assert was_enabled


def test_two_dtypes_of_one_memory_are_refused_as_torch_does() -> None:
    memory = torch.zeros(4)
    obj = [memory, memory.view(torch.int32)]
    with pytest.raises(RuntimeError) as ours:
        torch_pickle.capture(obj, pickle, 2, False, False)
    with pytest.raises(RuntimeError) as theirs:
        torch.save(obj, io.BytesIO())
    assert str(ours.value) == str(theirs.value)


def test_a_reducer_that_the_program_has_registered_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, torch.Tensor, lambda tensor: (float, (7.0,)))
    captured = torch_pickle.capture([torch.zeros(2)], pickle, 2, False, False)
    assert pickle.loads(dict(captured.records)["data.pkl"]) == [7.0]  # type: ignore[arg-type]


def test_a_way_to_reduce_that_the_program_has_put_in_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", lambda tensor, protocol: (float, (7.0,)))
    captured = torch_pickle.capture([torch.zeros(2)], pickle, 2, False, False)
    assert pickle.loads(dict(captured.records)["data.pkl"]) == [7.0]  # type: ignore[arg-type]


def test_locations_that_the_program_has_registered_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where storages of one device have several."""

    def tag(storage: torch.UntypedStorage) -> str | None:
        return "large" if storage.nbytes() > 64 else None

    registry = [(1, tag, lambda _storage, _location: None), *torch.serialization._package_registry]
    monkeypatch.setattr(torch.serialization, "_package_registry", registry)
    obj = [torch.zeros(2), torch.zeros(99), torch.zeros(3)]
    ours, theirs = (
        operations(of(obj)["data.pkl"]) for of in (partial(of_ours, observe=False), of_torch)
    )
    assert ours == theirs
    assert b"large" in of_torch(obj)["data.pkl"]
