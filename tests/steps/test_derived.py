"""Steps whose bf16 weights are derived from their fp32 master weights: smaller than any codec alone
makes them, the same bits for whatever reads them, and every damage is noticed and named.

Derived runs by themselves are tests/engine/test_roundings.py's business.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fastckpt
from fastckpt import Checkpointer
from fastckpt.cli import main
from fastckpt.engine.roundings import ITEMS_MIN
from fastckpt.errors import CorruptCheckpoint
from fastckpt.handle import SaveStats
from fastckpt.plan.boxes import Box
from fastckpt.plan.image import ItemRange
from fastckpt.state.tree import Leaf
from fastckpt.steps.shard import Shard
from tests.engine.test_planes import block_of, header_of
from tests.state.test_tree import bits
from tests.steps.test_step_fuzz import Forgery, small_shards

WAIT_S = 60.0
SHARD = "rank-00000.safetensors.planes"
DERIVED = 34
SHAPES = {"embedding": (2048, 320), "up": (1280, 320), "down": (320, 1280), "norm": (320,)}


def state_of(seed: int = 0) -> dict[str, Any]:
    """14 bytes for each parameter, as mixed precision has them."""
    random = torch.Generator().manual_seed(seed)
    model, optimizer = {}, {}
    for name, shape in SHAPES.items():
        master, exp_avg, deviation = (torch.randn(shape, generator=random) for _ in range(3))
        model[name] = (master * 0.02).to(torch.bfloat16)
        moments = {"exp_avg": exp_avg * 1e-4, "exp_avg_sq": (deviation * 1e-4).square()}
        optimizer[name] = {**moments, "master": master * 0.02}
    return {"model": model, "optimizer": optimizer}


def by_key(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        key = f"{prefix}{name}"
        found |= by_key(value, f"{key}/") if isinstance(value, dict) else {key: value}
    return found


def is_same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    pairs = by_key(found), by_key(wanted)
    assert pairs[0].keys() == pairs[1].keys()
    return all(torch.equal(bits(pairs[0][key]), bits(pairs[1][key])) for key in pairs[1])


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SaveStats]:
    """The directory of a saved step, which tests may read, and what its save told."""
    root = tmp_path_factory.mktemp("run")
    with small_shards(), Checkpointer(root, codec="planes", durable=False) as checkpointer:
        stats = checkpointer.save(5, state_of()).result(WAIT_S)
    return root / "step-00000005", stats


def frames_of(directory: Path) -> list[bytes]:
    content, at, found = (directory / SHARD).read_bytes(), 0, []
    for nbytes in json.loads((directory / "rank-00000.json").read_bytes())["frames"]:
        found.append(content[at : at + nbytes])
        at += nbytes
    return found


def test_it_takes_three_quarters(step: tuple[Path, SaveStats]) -> None:
    directory, stats = step
    index = json.loads((directory / "rank-00000.json").read_bytes())
    weights = sum(tensor.nbytes for tensor in state_of()["model"].values())
    assert index["version"] == 4
    assert 0.8 * weights < index["derived_nbytes"] == stats.derived_nbytes < weights
    assert index["nbytes"] > 7 * weights, "these are not 14 bytes for each parameter"
    assert index["file_nbytes"] <= 0.75 * index["nbytes"]
    assert "derived" in str(stats)


def test_it_comes_back(step: tuple[Path, SaveStats]) -> None:
    wanted = state_of()
    with Checkpointer(step[0].parent) as checkpointer:
        assert is_same(checkpointer.load(), wanted)
        target = {part: {**tensors} for part, tensors in state_of(1).items()}
        assert checkpointer.restore(target) == 5
    assert is_same(target, wanted)
    with fastckpt.open(step[0]) as tensors:  # the weights alone, and a few rows
        assert tensors.is_verified
        assert torch.equal(tensors["model/down"][:], wanted["model"]["down"])
        assert torch.equal(tensors["model/up"][700:702], wanted["model"]["up"][700:702])
    shard = b""
    for frame in frames_of(step[0]):
        shard += block_of(frame, shard)
    found = safetensors.torch.load(shard)
    assert all(torch.equal(bits(found[key]), bits(its)) for key, its in by_key(wanted).items())


def test_every_command_reads_it(step: tuple[Path, SaveStats], disk: Path) -> None:
    directory, wanted = step[0], state_of()
    with Checkpointer(disk / "plain") as checkpointer:
        checkpointer.save(5, wanted)
    assert main(["verify", str(directory.parent)]) == 0
    assert main(["inspect", str(directory)]) == 0
    assert main(["diff", str(directory), str(disk / "plain")]) == 0
    assert main(["convert", str(directory), str(disk / "a.pt"), "--to", "pt"]) == 0
    for path in (directory, disk / "a.pt"):
        target = {part: {**tensors} for part, tensors in state_of(1).items()}
        fastckpt.load_into(target, path)
        assert is_same(target, wanted)


# ---- Damage ----


class Damaged:
    """A copy of a step, of which bytes of the shard can be changed, and what then comes of it."""

    def __init__(self, step: Path, disk: Path) -> None:
        self.root = disk / "damaged"
        shutil.copytree(step.parent, self.root)
        self._path = self.root / step.name / SHARD
        self.frames = frames_of(step)

    def change(self, at: int, content: bytes) -> bytes:
        """Writes these bytes; returns those that were there."""
        fd = os.open(self._path, os.O_RDWR)
        try:
            before = os.pread(fd, len(content), at)
            os.pwrite(fd, content, at)
        finally:
            os.close(fd)
        return before

    def told(self, *keys: str) -> list[str]:
        """What reading each of these tensors alone, and then all of the step, raises."""
        found = []
        for key in keys:
            with pytest.raises(CorruptCheckpoint) as caught, fastckpt.open(self.root) as tensors:
                tensors[key][:]
            found.append(str(caught.value))
        with pytest.raises(CorruptCheckpoint), Checkpointer(self.root) as checkpointer:
            checkpointer.load()
        return found


def test_a_flipped_bit_of_a_master_weight(step: tuple[Path, SaveStats], disk: Path) -> None:
    """Seen by a reader of the weights alone, and by one of the master weights."""
    damaged = Damaged(step[0], disk)
    keys = master, weight = "optimizer/embedding/master", "model/embedding"
    pieces = json.loads((step[0] / "rank-00000.json").read_bytes())["pieces"]
    begin = next(piece["at"] for piece in pieces if piece["key"] == master)
    header = header_of(damaged.frames[0])
    (nbytes, kind, sizes), *_ = header
    assert kind == 20 and begin + 40_000 < nbytes
    planes = 8 + sum(8 + 4 * len(words) for _, _, words in header)
    at = planes + sizes[0] + sizes[1] + (begin + 40_000) // 4  # of its mantissa, near the top
    (before,) = damaged.change(at, b"\0")
    damaged.change(at, bytes([before ^ 0x40]))
    for key, told in zip(keys, damaged.told(*keys), strict=True):
        assert "CRC-32 mismatch" in told and repr(key) in told
    assert weight in told


def derived_runs(frames: list[bytes]) -> list[tuple[int, int]]:
    """Where the offsets of derived runs stand in the shard, and the offsets."""
    found, begin = [], 0
    for frame in frames:
        at = begin + 8
        for _, kind, words in header_of(frame):
            if kind == DERIVED:
                found.append((at + 8, words[0] + (words[1] << 32)))
            at += 8 + 4 * len(words)
        begin += len(frame)
    return found


def test_a_damaged_derived_run(step: tuple[Path, SaveStats], disk: Path) -> None:
    """Every bit of an offset; and two offsets that are swapped."""
    damaged = Damaged(step[0], disk)
    (at, source), *_, (other_at, other) = derived_runs(damaged.frames)
    for bit in [2, 12, 20, 31, 40, 63]:
        damaged.change(at, struct.pack("<Q", source ^ 1 << bit))
        (told,) = damaged.told("model/embedding")
        assert "CRC-32 mismatch" in told and "'model/embedding'" in told, bit
    damaged.change(at, struct.pack("<Q", other))
    damaged.change(other_at, struct.pack("<Q", source))
    for key, told in zip(SHAPES, damaged.told("model/embedding", "model/up"), strict=False):
        assert "CRC-32 mismatch" in told and repr(f"model/{key}") in told


def test_an_index_that_hides_what_is_derived(step: tuple[Path, SaveStats], disk: Path) -> None:
    """Its version is what keeps earlier readers away, so it is not the writer's word alone."""
    hiding = Damaged(step[0], disk)
    forged = Forgery(hiding.root / step[0].name)
    forged.index(lambda index: (index.pop("derived_nbytes"), index.update(version=3)))
    (told,) = hiding.told("model/embedding")
    assert "CRC-32 mismatch" in told and "'model/embedding'" in told


# ---- What may be derived from what ----


def leaf(
    key: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    box: Box | None = None,
    holders: tuple[int, ...] = (0,),
) -> Leaf:
    box = box or Box((0,) * len(shape), shape)
    return Leaf(key, torch.zeros(box.sizes, dtype=dtype), shape, box, holders, "")


def candidates(*leaves: Leaf) -> tuple[list[ItemRange], list[ItemRange]]:
    found = Shard(leaves, b"", 0).roundings()
    return [*found.masters], [*found.halves]


def test_tensors_of_one_shape_are_compared() -> None:
    half, single, shape = torch.bfloat16, torch.float32, (128, 256)
    items, nbytes = 128 * 256, 4 * 128 * 256
    masters, halves = candidates(
        leaf("w", half, shape),
        *(leaf(name, single, shape) for name in ("master", "exp_avg", "exp_avg_sq")),
        leaf("turned", single, (256, 128)),
        leaf("double", torch.float64, shape),
        leaf("other", torch.float16, shape),
    )
    begin = masters[0].begin
    assert masters == [ItemRange(begin + number * nbytes, items) for number in range(3)]
    assert [its.items for its in halves] == [items] and halves[0].begin >= begin + 3 * nbytes


@pytest.mark.parametrize(
    "leaves",
    [
        [leaf("w", torch.bfloat16, (ITEMS_MIN - 1,)), leaf("m", torch.float32, (ITEMS_MIN - 1,))],
        [leaf("w", torch.bfloat16, (512, 512)), leaf("m", torch.float32, (512 * 512,))],
        [leaf("w", torch.bfloat16, (512, 512)), leaf("m", torch.float16, (512, 512))],
        [
            leaf("w", torch.bfloat16, (512, 512), Box((0, 0), (256, 512))),
            leaf("m", torch.float32, (512, 512), Box((256, 0), (256, 512))),
        ],
        [
            leaf("w", torch.bfloat16, (512, 512), holders=(0, 1)),
            leaf("m", torch.float32, (512, 512), holders=(0, 1)),
        ],
    ],
    ids=["small", "flat", "no fp32", "other parts", "divided among ranks"],
)
def test_others_are_not(leaves: list[Leaf]) -> None:
    assert candidates(*leaves) == ([], [])
