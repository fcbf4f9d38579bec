"""fastckpt.open() and what a state may hold beside plain tensors: views, ties, names, objects."""

from __future__ import annotations

import argparse
import gc
import os
from collections import OrderedDict, defaultdict
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fastckpt


class Point(NamedTuple):
    x: torch.Tensor


def test_conjugates_and_negatives(disk: Path) -> None:
    values = torch.randn(6, 5, dtype=torch.complex64)
    views = {
        "conj": values.conj(),
        "neg": torch.randn(6, 5, dtype=torch.complex64).conj().imag,
        "turned": values.conj().t(),
        "part": values[2:].conj(),
        "typed": torch.nn.Parameter(values.conj()),
    }
    torch.save(views, disk / "a.pt")
    fastckpt.save(views, disk / "b.pt").result(60)
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, {name: view.detach() for name, view in views.items()}).result(60)
    for path in ("a.pt", "b.pt", "run"):
        with fastckpt.open(disk / path) as tensors:
            for name, view in views.items():
                assert torch.equal(tensors[name][...], view), (path, name)
                assert torch.equal(tensors[name][1:3, 2], view[1:3, 2]), (path, name)


def test_an_expanded_tensor_takes_the_memory_of_one_element(disk: Path) -> None:
    wide = torch.tensor([[1.0], [2.0]]).expand(2, 1 << 40)
    torch.save({"wide": wide, "flat": torch.ones(()).expand(1 << 40)}, disk / "a.pt")
    with fastckpt.open(disk / "a.pt") as tensors:
        assert tensors["wide"].shape == wide.shape
        assert tensors["wide"][1, 5:8].tolist() == [2, 2, 2]
        assert tensors["wide"][...].stride() == wide.stride()
        tensors.prefetch(["flat", "wide"])
        assert tensors["flat"][-3:].tolist() == [1, 1, 1]
        assert tensors["wide"][1:, 1 << 39 :].shape == (1, 1 << 39)
        assert fastckpt.open(disk / "a.pt")["flat"][7].item() == 1


def test_more_memory_than_there_is_is_told(disk: Path) -> None:
    overlapping = torch.zeros(1 << 21).as_strided((1 << 20, 1 << 20), (1, 1))
    torch.save({"w": overlapping}, disk / "a.pt")
    with (
        fastckpt.open(disk / "a.pt") as tensors,
        pytest.raises(fastckpt.StorageError, match="ENOMEM"),
    ):
        tensors["w"][...]


def test_a_tensor_for_which_memory_is_short_does_not_fail_others(disk: Path) -> None:
    overlapping = torch.zeros(1 << 21).as_strided((1 << 20, 1 << 20), (1, 1))
    torch.save({"w": overlapping, "s": torch.ones(3)}, disk / "a.pt")
    with fastckpt.open(disk / "a.pt") as tensors:
        tensors.prefetch(["s", "w"])
        assert tensors["s"][...].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "state", [5, None, 1.5, b"ab", torch.float32, torch.device("cpu"), {3}, "text"]
)
def test_a_state_without_tensors(state: Any, disk: Path) -> None:
    for path in saved({"state": state}, disk)[:2]:
        with fastckpt.open(path) as tensors:
            assert not tensors
    torch.save(state, disk / "c.pt")
    with fastckpt.open(disk / "c.pt") as tensors:
        assert not tensors and not tensors.others


def test_a_tensor_alone(disk: Path) -> None:
    torch.save(torch.arange(5), disk / "a.pt")
    with fastckpt.open(disk / "a.pt") as tensors:
        assert [*tensors] == [""] and tensors[""][1:3].tolist() == [1, 2]


@pytest.mark.parametrize("alignment", [1, 16, 64, 4096])
def test_any_alignment_of_storages(alignment: int, disk: Path) -> None:
    config = pytest.importorskip("torch.utils.serialization").config
    state = {"w": torch.randn(1000), "n": torch.arange(7)}
    with config.patch({"save.storage_alignment": alignment}):
        fastckpt.save(state, disk / "a.pt").result(60)
    with fastckpt.open(disk / "a.pt") as tensors:
        assert all(torch.equal(tensors[name][...], state[name]) for name in state)


def test_numbered_names_do_not_recurse(disk: Path) -> None:
    names = ["#2".join(["1", *[""] * count]) for count in range(1200)]
    torch.save({**dict.fromkeys(names, torch.ones(1)), 1: torch.zeros(1)}, disk / "a.pt")
    with fastckpt.open(disk / "a.pt") as tensors:
        assert len(tensors) == 1201


def saved(state: Any, disk: Path) -> list[Path]:
    torch.save(state, disk / "a.pt")
    fastckpt.save(state, disk / "b.pt").result(60)
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, state).result(60)
    return [disk / "a.pt", disk / "b.pt", disk / "run"]


def test_tied_tensors_have_all_their_names(disk: Path) -> None:
    weight, small = torch.randn(600, 600), torch.randn(3)
    state = {"in": weight, "out": {"w": weight}, "small": small, "again": [small]}
    for path in saved(state, disk):
        with fastckpt.open(path) as tensors:
            assert [*tensors] == ["in", "out/w", "small", "again/0"], path
            assert torch.equal(tensors["out/w"][5], weight[5])
            assert torch.equal(tensors["again/0"][...], small)


def test_names_that_collide_or_are_odd(disk: Path) -> None:
    large = torch.ones(600, 600)
    state = {
        "a": {0: torch.tensor(0), "0": torch.tensor(1)},
        "b": {0: large, "0": large + 1},
        "x/y": {"~": torch.tensor(2)},
        "fastckpt.tensor": {"fastckpt.per_rank": torch.tensor(3)},
        "c": {"k": torch.tensor(4)},
        "c#2": torch.tensor(5),
    }
    names = ["a/0", "a/0#2", "b/0", "b/0#2", "x~1y/~0", "fastckpt.tensor/fastckpt.per_rank"]
    for path in saved(state, disk):
        with fastckpt.open(path) as tensors:
            assert [*tensors] == [*names, "c/k", "c#2"], path
            found = [float(tensors[name][...].view(-1)[0]) for name in tensors]
            assert found == [0, 1, 1, 2, 2, 3, 4, 5]


def test_empty_and_sharded_leaves_of_a_step(disk: Path) -> None:
    state = {"none": torch.empty(0, 600), "own": fastckpt.PerRank(torch.ones(3)), "n": 3}
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, state).result(60)
    with fastckpt.open(disk / "run") as tensors:
        assert [*tensors] == ["none"] and tensors["none"][...].shape == (0, 600)


def test_objects_are_counted_and_containers_are_entered(disk: Path) -> None:
    state = {
        "sparse": torch.eye(3).to_sparse(),
        "default": defaultdict(list, {"w": torch.ones(2)}),
        "ordered": OrderedDict(w=torch.zeros(2)),
        "module": torch.nn.Linear(2, 2),
        "points": [Point(torch.ones(1)), Point(torch.ones(1))],
        "arguments": argparse.Namespace(lr=0.1),
        "device": torch.device("cpu"),
        "size": torch.Size([2]),
        "set": {1, 2},
        "tensors": {torch.ones(1)},
        "storage": torch.ones(3).untyped_storage(),
        "by tensor": {torch.full((), 7): 1},
    }
    torch.save(state, disk / "a.pt")
    with fastckpt.open(disk / "a.pt") as tensors:
        assert [*tensors] == ["default/w", "ordered/w", "tensors/0", "by tensor/key"]
        assert tensors["by tensor/key"][...] == 7
        assert tensors.others == {
            "torch._utils._rebuild_sparse_tensor": 1,
            "torch.nn.modules.linear.Linear": 1,
            f"{__name__}.Point": 2,
            "a storage": 1,
            "argparse.Namespace": 1,
        }


def test_keys_that_are_objects_of_unknown_classes(disk: Path) -> None:
    state = {argparse.Namespace: torch.ones(1), Point: torch.zeros(1)}
    torch.save(state, disk / "a.pt")
    with fastckpt.open(disk / "a.pt") as tensors:
        found = {name: tensors[name][...].item() for name in tensors}
    assert found == {"argparse.Namespace": 1, f"{__name__}.Point": 0}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickle(protocol: int, disk: Path) -> None:
    state = {"w": torch.randn(3, 4), "n": [torch.nn.Parameter(torch.ones(2))], "s": {1}, "e": b""}
    torch.save(state, disk / "a.pt", pickle_protocol=protocol)
    with fastckpt.open(disk / "a.pt") as tensors:
        assert torch.equal(tensors["w"][...], state["w"]) and tensors["n/0"][1] == 1
        assert not tensors.others


def test_a_part_of_what_was_prefetched_does_not_keep_the_rest(disk: Path) -> None:
    torch.save({"w": torch.randn(1000, 1000)}, disk / "a.pt")
    with fastckpt.open(disk / "a.pt") as tensors:
        tensors.prefetch(["w"])
        assert tensors["w"][3].untyped_storage().nbytes() == 4000


def test_many_small_tensors_are_read_at_once(disk: Path) -> None:
    state = {f"w{n}": torch.full((n % 7 + 1,), n) for n in range(3000)}
    for path in saved(state, disk):
        with fastckpt.open(path) as tensors:
            tensors.prefetch([*tensors])
            assert all(torch.equal(tensors[name][...], state[name]) for name in state)


def test_what_is_forgotten_is_closed(disk: Path) -> None:
    import os

    torch.save({"w": torch.ones(3)}, disk / "a.pt")
    gc.collect()  # what earlier tests have left must not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        fastckpt.open(disk / "a.pt")
    # A thread of an earlier test may close its own in between.
    assert len(os.listdir("/proc/self/fd")) <= before


def test_keys_that_are_no_text(disk: Path) -> None:
    keys = [b"a", b"b", torch.device("cpu"), torch.device("meta"), 1j, 2j, Path("x"), Path("y")]
    torch.save({key: torch.full((2,), n) for n, key in enumerate(keys)}, disk / "a.pt")
    with fastckpt.open(disk / "a.pt") as tensors:
        assert [int(tensor[0]) for tensor in tensors.values()] == [*range(8)]
        assert [*tensors][:4] == ["b'a'", "b'b'", "device", "device#2"] and not tensors.others


def test_keys_that_are_numbers_or_tuples(disk: Path) -> None:
    """The names are the same in every process."""
    keys = [1, "1", True, -3, (1, "a"), (date(2000, 1, 1),), 0.5, None]
    torch.save({key: torch.full((2,), n) for n, key in enumerate(keys[:2])}, disk / "a.pt")
    torch.save({key: torch.full((2,), n) for n, key in enumerate(keys[1:])}, disk / "b.pt")
    with fastckpt.open(disk / "a.pt") as tensors:
        assert [*tensors] == ["1", "1#2"]
    with fastckpt.open(disk / "b.pt") as tensors:
        assert [*tensors] == ["1", "True", "-3", "(1, 'a')", "(date,)", "0.5", "None"]
        assert [int(tensor[0]) for tensor in tensors.values()] == [*range(7)]


def test_a_chain_of_300_dicts(disk: Path) -> None:
    state: dict[str, Any] = {"w": torch.ones(3)}
    for _ in range(300):
        state = {"next": state}
    torch.save(state, disk / "a.pt")
    with fastckpt.open(disk / "a.pt") as tensors:
        assert tensors["next/" * 300 + "w"][...].tolist() == [1, 1, 1]


def test_a_file_without_sums_of_its_records(disk: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, disk / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    with fastckpt.open(disk / "a.pt") as tensors:
        assert tensors["w"][...].tolist() == [1, 1, 1]


def test_a_forked_process_opens_anew(disk: Path) -> None:
    torch.save({"w": torch.ones(3)}, disk / "a.pt")
    tensors = fastckpt.open(disk / "a.pt")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            fds = [os.open(disk, os.O_RDONLY) for _ in range(20)]
            with pytest.raises(ValueError, match="before this process was forked"):
                tensors["w"][...]
            with pytest.raises(ValueError, match="forked"):
                tensors.prefetch(["w"])
            tensors.close()
            del tensors
            gc.collect()
            for fd in fds:
                os.fstat(fd)  # raises if it was closed
            with fastckpt.open(disk / "a.pt") as own:
                assert [*own] == ["w"]
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert tensors["w"][...].tolist() == [1, 1, 1]
    tensors.close()
