"""Of objects that weights_only=True refuses, all others can be had: bit by bit as they were, shared
as they were, and nothing that a file names runs. Knows torch zips and pickles, no checkpoints.
"""

from __future__ import annotations

import collections
import io
import os
import pathlib
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt.errors import CheckpointError, CorruptCheckpoint
from fastckpt.formats.partial_objects import left_out, loaded, notes_in
from tests.kit.forgeries import Harm
from tests.kit.storm import Chance


class Holder:
    """What torch does not load unless it is allowed."""

    def __init__(self, value: Any) -> None:
        self.value = value


PATH, TENSOR, TEXT = pathlib.PurePosixPath("a/b"), torch.arange(3.0), "a text of its own"


def saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def rest_of(value: Any) -> Any:
    return loaded(saved(value), True, "here")


def notes(value: Any) -> dict[str, str]:
    return dict(notes_in(rest_of(value), None))


def test_what_makes_an_object_is_told_and_its_items_stay() -> None:
    holder = Holder(PATH)
    value = {
        "a": [1, PATH, (2, holder)],
        "set": {3, PATH},
        "ordered": collections.OrderedDict(x=PATH),
        "keyed": {PATH: 1},
        "class": Holder,
        "left": {"x": TENSOR, "y": {1, 2}, "z": collections.OrderedDict(x=1)},
    }
    kind, own = f"{type(PATH).__module__}.PurePosixPath", f"{__name__}.Holder"
    found = {"a/1": kind, "a/2/1": own, "set": kind, "ordered": kind, "keyed": kind, "class": own}
    assert notes(value) == found
    rest = rest_of(value)
    assert rest["a"][0] == 1 and rest["a"][2][0] == 2
    assert str(rest["left"]) == str(value["left"])
    assert notes(holder) == {"": own}


def test_what_an_object_shares_with_others_stays_shared() -> None:
    inner = [TENSOR, {"t": TENSOR[1:]}]
    holder = Holder([TEXT, inner, PATH])
    holder.itself = holder
    rest = rest_of({"first": holder, "again": holder, "i": inner, TEXT: TENSOR, "path": PATH})
    assert left_out(rest["first"]) == left_out(rest["again"]) == f"{__name__}.Holder"
    assert left_out(rest["path"]) is not None
    assert rest["i"][0] is rest[TEXT] and torch.equal(rest[TEXT], TENSOR)
    views = rest["i"][0], rest["i"][1]["t"]
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    behind = rest_of([holder, inner, inner])  # made first inside of what is left out
    assert behind[1] is behind[2] and torch.equal(behind[1][0], TENSOR)


ARRAYS = [
    numpy.arange(5, dtype="u4"),
    numpy.asfortranarray(numpy.ones((2, 3))),
    numpy.zeros((0, 3), "f2"),
    numpy.array(5),
    numpy.array(["a", "bb"]),
    numpy.array([b"abc"]),
    numpy.array([True, False]),
    numpy.array([1j]),
]
OTHER_ARRAYS = [
    numpy.array([{}]),
    numpy.array(["2020"], "M8[ns]"),
    numpy.zeros(2, [("a", "i4")]),
    numpy.arange(3, dtype=">i4"),
    numpy.datetime64("2020"),
    numpy.ma.masked_array([1]),
]


def test_arrays_and_scalars_of_numpy() -> None:
    scalars = [*map(numpy.dtype, "fdil?D"), *map(numpy.dtype, "fdil?D")]
    values = [numpy.random.get_state(), *ARRAYS, ARRAYS[0], *(its.type(1) for its in scalars)]
    for found, value in zip(rest_of(values), values, strict=True):
        assert type(found) is type(value)
        if isinstance(value, numpy.ndarray):
            assert found.dtype == value.dtype and numpy.array_equal(found, value)
            assert found.flags.f_contiguous == value.flags.f_contiguous and found.flags.writeable
        else:
            assert str(found) == str(value)
    rest = rest_of([ARRAYS[0], *OTHER_ARRAYS, ARRAYS[0]])
    assert rest[0] is rest[-1] and all(left_out(its) is not None for its in rest[1:-1])


class Asked:
    """Unpickled, it calls what it was given."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


@pytest.mark.parametrize(
    "arguments",
    [
        ((6,),),
        ((3,), "O"),
        ((2,), "O", bytearray(b"A" * 16)),
        ((1 << 40,), "b", b"x", 0, (0,)),
        ((2,), "f4,O"),
    ],
)
def test_no_array_is_made_by_its_class(arguments: tuple[Any, ...]) -> None:
    """Which takes memory, its layout, and pointers from the pickle."""
    array = Asked(numpy.ndarray, *arguments)
    found = rest_of([array, Asked(collections.OrderedDict, array), 7])
    assert left_out(found[0]) == "numpy.ndarray" and left_out(found[1]) and found[2] == 7


def test_no_layout_of_an_array_is_taken_from_a_file() -> None:
    """NumPy itself would take bytes for pointers to objects, or read past the end of them."""
    text = io.BytesIO()
    torch.save([PATH, numpy.arange(3, dtype="i8"), numpy.float64(1.5), 7], text)
    with zipfile.ZipFile(text) as archive:
        name = next(each for each in archive.namelist() if each.endswith("data.pkl"))
        content = archive.read(name)
    changes = {
        b"X\x02\x00\x00\x00i8": b"X\x02\x00\x00\x00O8",
        b"K\x03\x85": b"K\x04\x85",  # the shape
        b"X\x02\x00\x00\x00f8": b"X\x02\x00\x00\x00f4",
        b"NNNJ": b"N]NJ",
    }
    for old, new in changes.items():
        assert old in content, "the pickle has it"
        found = loaded(forged(content.replace(old, new)), True, "here")
        assert found[3] == 7 and any(left_out(its) for its in found[1:3])


atoms = st.one_of(st.integers(), st.integers(1 << 64, 1 << 70), st.text(max_size=3), st.none())
shared = st.sampled_from([PATH, TENSOR, TEXT, TENSOR[1:], Holder(PATH), Holder(TENSOR)])
values = st.recursive(
    st.one_of(atoms, shared, st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=2), st.just(PATH)), inner, max_size=3),
        st.lists(inner, max_size=2).map(lambda items: collections.OrderedDict(enumerate(items))),
        inner.map(Holder),
        inner.map(lambda item: [item, item, Holder(item), item]),
    ),
    max_leaves=12,
)


def is_refused(value: Any) -> bool:
    """Whether a value has to go as a whole."""
    if isinstance(value, dict):
        return PATH in value or (type(value) is not dict and holds_refused(value))
    return is_refused_alone(value)


def holds_refused(value: Any) -> bool:
    items: list[Any] = [*value.values()] if isinstance(value, dict) else value
    inner = isinstance(value, dict | list | tuple) and any(map(holds_refused, items))
    return inner or (isinstance(value, dict) and PATH in value) or is_refused_alone(value)


def is_refused_alone(value: Any) -> bool:
    return isinstance(value, Holder | pathlib.PurePath)


def check_same(found: Any, value: Any) -> None:
    if is_refused(value):
        assert left_out(found) is not None
    elif isinstance(value, dict | list | tuple):
        assert left_out(found) is None and type(found) is type(value)
        pairs = [(found, value)]
        if isinstance(value, dict):
            assert [*found] == [*value]
            pairs = [([*found.values()], [*value.values()])]
        for mine, theirs in pairs:
            assert len(mine) == len(theirs)
            for item, other in zip(mine, theirs, strict=True):
                check_same(item, other)
    elif isinstance(value, torch.Tensor):
        assert torch.equal(found, value)
    else:
        assert type(found) is type(value) and found == value


@settings(deadline=None, max_examples=Chance.examples(30))
@given(value=values)
def test_any_nest_of_them(value: Any) -> None:
    check_same(rest_of([value, PATH]), [value, PATH])
    (both,) = rest_of([[value, value, PATH]])
    assert both[0] is both[1] or type(value) in (int, float, tuple)
    with torch.serialization.safe_globals([Holder]):
        found = rest_of([Holder(5), PATH])
        assert found[0].value == 5 and left_out(found[1]) is not None


class Items(dict[str, Any]):
    """A dict whose items torch does not put in, even if the class is allowed."""


def test_what_torch_refuses_for_other_reasons_than_a_name_leaves_the_rest() -> None:
    held: list[Any] = [TENSOR]
    itself = (held, 1)
    held.append(itself)
    value = {"t": itself, "n": 1 << 4000, "items": Items(x=TENSOR), "rest": [TENSOR, Items()]}
    with torch.serialization.safe_globals([Items]):
        rest = rest_of(value)
    assert rest["n"] == value["n"] and rest["t"][0][1] is rest["t"]
    assert dict(notes_in(rest, None)) == {"items": f"{__name__}.Items"}
    assert rest["t"][0][0] is rest["rest"][0] and type(rest["rest"][1]) is Items


@pytest.mark.parametrize("change", [b"}X\x01\x00\x00\x00aNsb", b"N}X\x01\x00\x00\x00aNs\x86b"])
def test_a_class_is_not_changed(change: bytes) -> None:
    for named in (b"ctorch\nSize\n", b"ctorch\nTensor\n", b"ctorch._utils\n_rebuild_tensor_v2\n"):
        rest = loaded(forged(b"\x80\x02](" + BAD + named + change + b"K\x05e."), True, "here")
        assert left_out(rest[1]) is not None and rest[2] == 5
    assert not any(hasattr(each, "a") for each in (torch.Size, torch.Tensor))


def test_nothing_runs(disk: Path) -> None:
    harm = Harm(disk / "trace")
    rest = rest_of({"h": harm, "in": Holder([harm, TENSOR]), "t": TENSOR})
    assert torch.equal(rest["t"], TENSOR)
    assert left_out(rest["h"]) == f"{os.mkdir.__module__}.mkdir"
    assert not (disk / "trace").exists()
    loaded(saved(harm), False, "here")
    assert (disk / "trace").exists(), "the trace would be seen"


def forged(content: bytes) -> io.BytesIO:
    """A torch zip with this pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", b"3\n")
    buffer.seek(0)
    return buffer


BAD, ORDERED = b"cos\nmkdir\n", b"ccollections\nOrderedDict\n"
NO_PICKLES = {
    "cut off": b"\x80\x02](" + BAD,
    "no value": b"\x80\x02" + BAD + b"R.",
    "no mark": b"\x80\x02" + BAD + b"t.",
    "unknown memo": b"\x80\x02](" + BAD + b"h\x05e.",
    "class changed": b"\x80\x02](" + BAD + ORDERED + b"q\x00h\x00}X\x01\x00\x00\x00ah\x00sb0e.",
    "a part behind": b"\x80\x02]q\x00(" + ORDERED + b")RX\x01\x00\x00\x00ah\x00s" + BAD + b"e.",
    "protocol 0": pickle.dumps([os.mkdir], 0),
    "many names": b"\x80\x02](" + b"".join(b"cos\nn%d\n" % n for n in range(1100)) + b"e.",
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", NO_PICKLES)
def test_what_no_pickler_writes_is_refused_as_a_whole(name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="weights_only=False"):
        loaded(forged(NO_PICKLES[name]), True, "here")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_what_torchs_pickler_does_not_write_is_read_where_it_does_no_harm() -> None:
    for content in (
        pickle.dumps([os.mkdir], 4),
        b"\x80\x02](}q\x00}q\x00" + BAD + b"e.",
        b"\x80\x02](}q\x00q\x01" + BAD + b"e.",
    ):
        maker = left_out(loaded(forged(content), True, "here")[-1])
        assert maker is not None and maker.endswith(".mkdir")


def test_a_zip_that_is_forged_raises_no_other_error() -> None:
    """Python's reader of zip files and torch's do not stop at the same things."""
    content = saved([PATH, TENSOR]).getvalue()
    outcomes = set[str]()
    for at in range(content.index(b"PK\x01\x02"), len(content)):
        forgery = bytearray(content)
        forgery[at] = 255
        try:
            rest = loaded(io.BytesIO(forgery), True, "here")
        except (pickle.UnpicklingError, CheckpointError) as error:
            outcomes.add(type(error).__name__)
        else:
            assert left_out(rest[0]) is not None and rest[1].shape == TENSOR.shape
    assert outcomes == {"UnpicklingError", "CorruptCheckpoint"}


def test_values_that_refer_to_each_other_over_and_over_are_bounded() -> None:
    """Each of many lists has the one before it many times, and is a part of one object more."""
    lists: list[Any] = [[]]
    for _ in range(150):
        lists.append([lists[-1]] * 300)
    made = [collections.OrderedDict(x=each) for each in lists]
    assert len(rest_of([PATH, made])[1]) == 151
    ordered = b"ccollections\nOrderedDict\n"
    content = b"\x80\x02](" + BAD + b"](" + b"N" * 1000 + b"eq\x00" + ordered + b"q\x01"
    with pytest.raises(pickle.UnpicklingError, match="weights_only=False"):
        loaded(forged(content + b"h\x01h\x00\x85R" * 1000 + b"e."), True, "here")


def test_a_list_that_many_objects_share_is_looked_at_once() -> None:
    long = [*range(10_000)]
    made = [collections.OrderedDict(x=long, y=PATH if at == 200 else 0) for at in range(400)]
    rest = rest_of(made)
    assert type(rest[0]) is collections.OrderedDict and len(rest) == 400
    assert all(each["x"] is rest[0]["x"] for each in rest if left_out(each) is None)
    assert [left_out(each) is not None for each in rest].index(True) == 200


REFUSED = b"cos\nsystem\n"


def zip_of(pickled: bytes, storage: bytes = b"") -> io.BytesIO:
    """A torch zip with this pickle, and one storage."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", storage)
        archive.writestr("archive/version", b"3\n")
    buffer.seek(0)
    return buffer


def test_tensors_of_other_devices_come_to_the_host_beside_what_is_refused() -> None:
    values = pickle.dumps(("storage", torch.FloatStorage, "0", "cpu", 3), protocol=2)[2:-1]
    plain = b"ctorch._utils\n_rebuild_tensor_v2\n(" + values + b"QK\x00K\x03\x85K\x01\x85\x89"
    plain += b"ccollections\nOrderedDict\n)RtR"
    rebuild = b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n"
    tensor = rebuild + b"(" + plain + b"ctorch\nfloat32\nX\x04\x00\x00\x00meta\x89tR"
    for rest in (b"", b"X\x01\x00\x00\x00x" + REFUSED):
        source = zip_of(b"}(X\x01\x00\x00\x00t" + tensor + rest + b"u", TENSOR.numpy().tobytes())
        assert torch.equal(loaded(source, True, "here")["t"], TENSOR)


def test_names_of_what_lies_deep_take_little_memory() -> None:
    depth = 20_000
    levels = b"](" * depth + (REFUSED + b"e") * depth
    found = [*notes_in(loaded(zip_of(levels), True, "here"), "x")]
    assert len(found) == 1000 and max(len(name) for name, _maker in found) <= 1000
    assert all(name.startswith("x/") for name, _maker in found)


@pytest.mark.parametrize(
    "key", [b")" + b"\x85" * 500_000, b")" + b"q\x00h\x00\x86q\x01h\x01\x86" * 60], ids=len
)
def test_keys_are_hashed_in_little_time_and_stack(key: bytes) -> None:
    """Torch's own reader, which has no such limit, never comes to the key."""
    for pickled in (
        b"](" + REFUSED + b"}" + key + b"Nse",
        b"](" + REFUSED + b"c__builtin__\nset\n](" + key + b"e\x85Re",
    ):
        with pytest.raises(pickle.UnpicklingError):
            loaded(zip_of(pickled), True, "here")


def test_no_text_of_a_file_is_taken_for_a_want_of_memory() -> None:
    device = b"ctorch\ndevice\nX\x05\x00\x00\x00alloc\x85R"
    with pytest.raises(CorruptCheckpoint):
        loaded(zip_of(device), True, "here")
    with pytest.raises(pickle.UnpicklingError):
        loaded(zip_of(b"](" + REFUSED + device + b"e"), True, "here")


def test_what_is_read_on_is_what_torch_has_refused() -> None:
    """Another process may write to the file in between."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(torch.nn.Identity()), buffer)
    program, refused = buffer.getvalue(), zip_of(b"](" + REFUSED + b"e").getvalue()

    class Changing(io.BytesIO):
        openings = 0

        def read(self, size: int | None = -1) -> bytes:
            content = super().read(size)
            if size == len(b"PK34"):  # torch looks first, then we
                self.openings += 1
                if self.openings == 2:
                    self.seek(0)
                    self.write(program)
            return content

    source = Changing(refused)
    with pytest.raises(CorruptCheckpoint, match="TorchScript"):
        loaded(source, True, "here")
    assert source.openings == 2
