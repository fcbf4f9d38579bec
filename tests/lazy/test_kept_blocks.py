"""Small reads of an open checkpoint come from verified blocks in memory, which stay few."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fastckpt
from fastckpt.cli import main
from fastckpt.engine.read_stream import EngineReadStream
from fastckpt.errors import CorruptCheckpoint
from fastckpt.reading import kept_blocks
from fastckpt.reading.verified import Body
from tests.kit.kinds import KINDS, by_fastckpt, by_safetensors, by_torch, flat, steps
from tests.kit.noise import flip

BLOCK_BYTES = 8 << 20


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """A list that gets the path and number of each block that is read to come."""
    read: list[tuple[str, int]] = []
    stream = Body.stream

    def recorded(self: Body, wanted: Sequence[int] = (), direct: Any = None) -> EngineReadStream:
        read.extend((self.path, number) for number in wanted)
        return stream(self, wanted, direct)

    monkeypatch.setattr(Body, "stream", recorded)
    return read


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A function that returns the number of kept blocks that are in memory."""
    made = weakref.WeakSet[torch.Tensor]()
    read = kept_blocks._read

    def recorded(*arguments: Any) -> torch.Tensor:
        memory = read(*arguments)
        made.add(memory)
        return memory

    monkeypatch.setattr(kept_blocks, "_read", recorded)
    return lambda: len(made)


def kept_at_most(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(kept_blocks, "_KEPT_BYTES", count * BLOCK_BYTES)


def layers(count: int) -> dict[str, torch.Tensor]:
    return {f"layer {number}": torch.full((1 << 15,), float(number)) for number in range(count)}


def sharded(state: dict[str, torch.Tensor], disk: Path, codec: Any = None) -> Path:
    """A step whose small tensors lie in its shard, too, since they are DTensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, options = init_device_mesh("cpu", (1,)), {"codec": codec} if codec else {}
        parts = {
            name: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
            for name, tensor in state.items()
        }
        with fastckpt.Checkpointer(disk / f"sharded {codec}", **options) as checkpointer:
            checkpointer.save(1, parts).result(60)
    finally:
        dist.destroy_process_group()
    return disk / f"sharded {codec}"


def packed(state: dict[str, torch.Tensor], disk: Path) -> Path:
    return sharded(state, disk, "zstd")


SAVES = [by_fastckpt, by_torch, by_safetensors, steps, sharded, packed]


@pytest.mark.parametrize("save", SAVES)
def test_small_tensors_in_any_order_read_each_block_once(
    save: Callable[[Any, Path], Path], blocks: list[tuple[str, int]], disk: Path
) -> None:
    state = layers(200) | {"small": torch.arange(5.0), "empty": torch.zeros(0, 3)}
    order = random.Random(1).sample([*state], len(state))
    with fastckpt.open(save(state, disk)) as tensors:
        blocks.clear()
        for name in order:
            assert torch.equal(tensors[name][...], state[name])
            assert torch.equal(tensors[name][1:3], state[name][1:3])
        assert len({*blocks}) == len(blocks) >= 4


def test_a_part_across_the_end_of_a_block(disk: Path) -> None:
    state = {"a": torch.arange(6 << 20), "b": torch.arange(1000.0).reshape(25, 40)}
    for save in SAVES:
        with fastckpt.open(save(state, disk)) as tensors:
            for at in range((1 << 20) - 1500, (1 << 20) + 1000, 97):
                assert torch.equal(tensors["a"][at : at + 700], state["a"][at : at + 700])
            assert torch.equal(tensors["b"][::2, 3:5], state["b"][::2, 3:5])


def test_threads_keep_no_more_than_the_bound(
    alive: Callable[[], int], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_at_most(monkeypatch, 2)
    state, found = layers(320), list[bool]()  # in five blocks
    with fastckpt.open(sharded(state, disk)) as tensors, ThreadPoolExecutor(6) as threads:

        def read(name: str) -> int:
            found.append(torch.equal(tensors[name][...], state[name]))
            return alive()

        counts = [*threads.map(read, random.Random(2).choices([*state], k=900))]
        assert all(found) and max(counts) == 2
        tensors.close()
        assert alive() == 0


def test_a_part_that_is_large_is_not_kept(alive: Callable[[], int], disk: Path) -> None:
    state = {"large": torch.randn(5 << 20), "none": torch.zeros(4, 0)}
    for save in SAVES:
        with fastckpt.open(save(state, disk)) as tensors:
            assert torch.equal(tensors["large"][...], state["large"])
            assert torch.equal(tensors["none"][1:], state["none"][1:])
            tensors.prefetch(["large"])
            assert torch.equal(tensors["large"][7:9], state["large"][7:9]) and alive() == 0


def test_a_block_larger_than_the_bound_is_not_kept(
    alive: Callable[[], int], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_blocks, "_KEPT_BYTES", 1 << 20)
    state = layers(100)
    with fastckpt.open(by_fastckpt(state, disk)) as tensors:
        assert all(torch.equal(tensors[name][...], state[name]) for name in state)
        assert alive() == 0


@pytest.mark.parametrize("save", [by_fastckpt, sharded, packed])
def test_a_damaged_block_is_not_kept(save: Callable[[Any, Path], Path], disk: Path) -> None:
    state = {"w": torch.randn(1 << 18), "z": torch.randn(3 << 20)}
    path = save(state, disk)
    with fastckpt.open(path) as tensors:
        file = Path(tensors["z"].shards[0].path)
        at = file.stat().st_size - (1 << 20)  # in the second block
        flip(file, at)
        for _attempt in range(2):
            with pytest.raises(CorruptCheckpoint):
                tensors["z"][-5:]
            assert torch.equal(tensors["w"][...], state["w"])
    flip(file, at)  # flips the bit back
    with fastckpt.open(path) as tensors:
        assert torch.equal(tensors["z"][-5:], state["z"][-5:])
        flip(file, at)  # a block in memory stays as it was verified
        assert torch.equal(tensors["z"][-99:], state["z"][-99:])


def test_a_close_waits_for_a_read_and_leaves_no_block(
    alive: Callable[[], int], disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, begun, go = layers(3), threading.Event(), threading.Event()
    tensors, read = fastckpt.open(by_fastckpt(state, disk)), kept_blocks._read

    def held(*arguments: Any) -> torch.Tensor:
        begun.set()
        assert go.wait(60)
        return read(*arguments)

    monkeypatch.setattr(kept_blocks, "_read", held)
    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(lambda: tensors["layer 1"][...])
        assert begun.wait(60)
        closing = threads.submit(tensors.close)
        go.set()
        assert torch.equal(reading.result(60), state["layer 1"])
        closing.result(60)
    assert alive() == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_in_the_files_is_one_of_all_names(kind: str, disk: Path) -> None:
    state = flat()
    path = KINDS[kind][0](state, disk)
    with fastckpt.open(path) as tensors:
        assert sorted(tensors.in_file_order(tensors)) == sorted(state)
        assert tensors.in_file_order(["large"]) == ["large"]
    rules = {"^w[.]": "weight "}
    with fastckpt.open(path, rename=rules) as tensors:
        assert "weight bool" in tensors
        assert sorted(tensors.in_file_order(tensors)) == sorted(tensors)


@pytest.mark.parametrize("save", [by_fastckpt, by_torch, by_safetensors, sharded])
def test_reads_in_the_order_of_the_files_need_one_block(
    save: Callable[[Any, Path], Path],
    blocks: list[tuple[str, int]],
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = layers(200)
    for number in range(0, 200, 2):  # in other dtypes, which other places of the file hold
        state[f"layer {number}"] = state[f"layer {number}"].double()
    path = save(state, disk)
    kept_at_most(monkeypatch, 2)
    with fastckpt.open(path) as tensors:
        ordered = tensors.in_file_order(tensors)
        blocks.clear()
        for name in ordered:
            assert torch.equal(tensors[name][...], state[name])
        assert len({*blocks}) == len(blocks) >= 5


def test_a_diff_reads_each_block_a_few_times(
    blocks: list[tuple[str, int]], disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = layers(700)  # more than the blocks that are kept
    mixed = {name: state[name] for name in random.Random(3).sample([*state], len(state))}
    assert main(["diff", str(by_fastckpt(mixed, disk)), str(sharded(state, disk))]) == 0
    assert "tensors: 700 equal" in capsys.readouterr().out
    assert len(blocks) <= 4 * len({*blocks})
