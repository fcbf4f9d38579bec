"""Steps that share blocks with the one before: what is written, what comes back, and that no harm
to an older step, no wrong hash and no crash ever shows in a newer one.

Most tests clone by copies (doubles.Cloning), under the kernel's rules, so that they run anywhere;
those of one disk's blocks in two files need a file system that clones, and mount it.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import itertools
import json
import logging
import os
import random
import re
import shutil
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch

from fastckpt import Checkpointer, PerRank, SaveStats
from fastckpt.engine.reuse import CHUNK_BYTES, OtherFile, _comparable
from fastckpt.errors import CorruptCheckpoint, StorageError
from fastckpt.formats.shard_index import ShardIndex
from fastckpt.plan.chunk_hashes import HASH_BYTES, ChunkHashes
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.steps import log as save_log
from fastckpt.storage.file_system import Storage
from tests.crews.group_crew import Member, Nursery
from tests.crews.steps_states import spread_by_group
from tests.doubles import (
    Cloning,
    Crash,
    FailAt,
    Operation,
    PowerCut,
    Recorder,
    dead_pid,
    path_of,
    plant,
    process_on,
)
from tests.files.test_faults import MKFS_OPTIONS, mounted, run_as_root
from tests.noise import noise
from tests.steps.test_checkpointer import directories
from tests.steps.test_step_fuzz import Forgery
from tests.storm import Storm

WAIT_S = 60.0
SEED = 20261123
MIB = 1 << 20
SHARD = "rank-00000.safetensors"
SAMPLES = 8  # chunks of a block that are hashed first
NOT_HASHED = b"\xff" * HASH_BYTES
RANKS_IMPORT = "tests.crews.steps_imports"
T = TypeVar("T")


class CloningCrash(Cloning, Crash):
    """A crash where ranges can be cloned."""


class CloningFailAt(Cloning, FailAt):
    """A failing operation where ranges can be cloned."""


@pytest.fixture(autouse=True)
def small_tensors_are_in_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastckpt.state.tree.SMALL_BYTES", 1)


def state(step: int, frozen_bytes: int = 5 * CHUNK_BYTES, moving_bytes: int = CHUNK_BYTES) -> Any:
    """A state of which one part is the same in each step."""
    return {
        "frozen": noise(frozen_bytes, 1),
        "moving": noise(moving_bytes, 100 + step),
        "own": PerRank(("rank", step)),
        "name": f"step {step}",
    }


def assert_holds(found: Any, expected: Any) -> None:
    """That a state was loaded bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            same = found[name].dtype == value.dtype and torch.equal(found[name], value)
            assert same and found[name].shape == value.shape, name
        elif isinstance(value, PerRank):
            assert found[name].value == value.value
        else:
            assert found[name] == value


def saved(root: Path, *steps: int, **options: Any) -> list[SaveStats]:
    with Checkpointer(root, codec="reuse", **options) as checkpointer:
        return [checkpointer.save(step, state(step)).result(WAIT_S) for step in steps]


def check(root: Path, *steps: int) -> None:
    with Checkpointer(root) as checkpointer:
        assert checkpointer.steps() == sorted(steps)
        for step in steps:
            assert_holds(checkpointer.load(step), state(step))


def name(step: int) -> str:
    return f"step-{step:08d}"


def index_of(root: Path, step: int) -> Any:
    return json.loads((root / name(step) / "rank-00000.json").read_bytes())


def written(recorder: Recorder, step: int) -> int:
    """The bytes of a step's shard that were written and not cloned."""
    shard = os.path.join(name(step), SHARD)
    writes = (each for each in recorder.log if each.name == "write")
    return sum(each.args[1] for each in writes if each.path.endswith(shard))


def split(content: bytes, nbytes: int) -> list[bytes]:
    return [content[at : at + nbytes] for at in range(0, len(content), nbytes)]


def chunks(path: Path) -> list[bytes]:
    return split(path.read_bytes(), CHUNK_BYTES)


def common_nbytes(one: Path, other: Path) -> int:
    """The bytes of the chunks that two files have in the same place."""
    pairs = zip(chunks(one), chunks(other), strict=False)
    return sum(len(a) for a, b in pairs if a == b)


def expected_nbytes(root: Path, last: int, step: int) -> int:
    """The bytes that a step reuses of the last one: chunks that both have in the same place and the
    last one has hashed; but none of a block in which all that are looked at first have changed.
    """
    old, new = (chunks(root / name(each) / SHARD) for each in (last, step))
    known, nbytes = split(hashes_of(root, last), HASH_BYTES), 0
    for first in range(0, len(new), BLOCK_BYTES // CHUNK_BYTES):
        block = new[first : first + BLOCK_BYTES // CHUNK_BYTES]
        equal = [
            before == now and value != NOT_HASHED
            for before, now, value in zip(old[first:], block, known[first:], strict=False)
        ]
        if any(equal[:: max(1, len(block) // SAMPLES)]):
            nbytes += sum(len(now) for now, is_equal in zip(block, equal, strict=False) if is_equal)
    return nbytes


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (value,) = file.read(1)
        file.seek(offset)
        file.write(bytes([value ^ 1]))


@contextmanager
def place_of(kind: str, disk: Path, memory: Path) -> Iterator[Path]:
    """A directory where ranges can be cloned: by the file system of this kind, or by a double."""
    if kind == "copies":
        with process_on(Cloning()):
            yield memory
        return
    with mounted(kind, disk) as mount:
        yield mount


KINDS = pytest.mark.parametrize(
    "kind",
    ["copies", *(pytest.param(each, marks=pytest.mark.filesystem) for each in ("xfs", "btrfs"))],
)


# ---- arguments ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "auto"}, "codec is 'auto', must be one of"),
        ({"codec": "reuse", "staging": "gds"}, 'codec="reuse" with staging="gds": what is hashed'),
    ],
)
def test_arguments_are_checked(disk: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpointer(disk, **options)


# ---- what is written ----


def test_what_has_not_changed_is_not_written(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Cloning()
    with process_on(recorder), caplog.at_level(logging.INFO, "fastckpt"):
        first, second, third = saved(memory, 1, 2, 3)
    assert first.reused_nbytes == 0 and "reused" not in str(first)
    nbytes = (memory / name(2) / SHARD).stat().st_size
    for step, stats in ((2, second), (3, third)):
        common = common_nbytes(memory / name(step - 1) / SHARD, memory / name(step) / SHARD)
        assert stats.reused_nbytes == common == nbytes - written(recorder, step)
        assert common >= 4 * CHUNK_BYTES
        assert "640 KiB of it reused" in str(stats)
    assert written(recorder, 1) == nbytes
    lines = [text for text in caplog.messages if text.startswith("saved")]
    assert ["reused" in text for text in lines] == [False, True, True]
    check(memory, 1, 2, 3)
    keys = {index_of(memory, step)["hashes"]["key"] for step in (1, 2, 3)}
    assert len(keys) == 1


def test_without_reuse_nothing_is_hashed_or_cloned(memory: Path) -> None:
    recorder = Cloning()
    with process_on(recorder):
        saved(memory, 1)
        number = len(recorder.log)
        with Checkpointer(memory) as checkpointer:
            checkpointer.save(2, state(2)).result(WAIT_S)
        assert "clone_range" not in recorder.names_logged()[number:]
        assert "hashes" not in index_of(memory, 2) and index_of(memory, 2)["version"] == 1
        stats = saved(memory, 3)  # the last step has no hashes
    assert stats[0].reused_nbytes == 0 and index_of(memory, 3)["version"] == 3
    check(memory, 1, 2, 3)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOTTY])
def test_where_nothing_can_be_cloned_everything_is_written(
    disk: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(Recorder):
        def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
            if operation.name == "clone_range":
                raise OSError(code, os.strerror(code))
            return real()

    recorder = Refusing(by_engine=True)
    with process_on(recorder), caplog.at_level(logging.INFO, "fastckpt"):
        stats = saved(disk, 1, 2)
    assert [each.reused_nbytes for each in stats] == [0, 0]
    lines = [text for text in caplog.messages if "nothing is reused" in text]
    assert len(lines) == 1 and f"[{errno.errorcode[code]}]" in lines[0]
    assert recorder.names_logged().count("allocate") == 4  # two files of each step
    assert "lock shared" not in recorder.names_logged(), "the second save looks for no last shard"
    assert "hashes" not in index_of(disk, 2)
    check(disk, 1, 2)


@pytest.mark.filesystem
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_file_systems_that_clone_nothing(disk: Path, kind: str) -> None:
    with mounted(kind, disk) as mount:
        assert [stats.reused_nbytes for stats in saved(mount / "run", 1, 2)] == [0, 0]
        check(mount / "run", 1, 2)


def test_small_tensors_that_change_lie_together(memory: Path) -> None:
    """As adapters between frozen weights: not much more is written than changes."""

    def layers(step: int) -> dict[str, torch.Tensor]:
        held = {}
        for layer in range(16):
            held[f"{layer}.weight"] = noise(3 * CHUNK_BYTES, layer)
            held |= {
                f"{layer}.{part}": noise(16 << 10, 1000 * step + 10 * layer + number)
                for number, part in enumerate("ab")
            }
        return held

    with process_on(Cloning()), Checkpointer(memory, codec="reuse") as checkpointer:
        for step in (1, 2):
            stats = checkpointer.save(step, layers(step)).result(WAIT_S)
        assert_holds(checkpointer.load(2), layers(2))
    shard = memory / name(2) / SHARD
    changed = 16 * 2 * (16 << 10)
    assert shard.stat().st_size - stats.reused_nbytes < changed + CHUNK_BYTES


@pytest.mark.parametrize(
    "options",
    [
        {"staging_bytes": BLOCK_BYTES},
        {"drain_rate": "1GB/s"},
        {"fence": "step", "backend": "threads", "durable": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_option_brings_back_the_same(memory: Path, options: dict[str, Any]) -> None:
    def large(step: int) -> Any:
        return state(step, 20 * MIB + 12_345, 3 * MIB)

    with process_on(Cloning()), Checkpointer(memory, codec="reuse", **options) as checkpointer:
        for step in (1, 2, 3):
            stats = checkpointer.save(step, large(step)).result(WAIT_S)
            assert_holds(checkpointer.load(step), large(step))
    assert stats.reused_nbytes > 19 * MIB


def test_the_last_chunk_is_shared_only_if_both_files_end_there(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A shorter chunk has the same hash as one with zeros behind it."""
    with process_on(Cloning()), Checkpointer(memory, codec="reuse") as checkpointer:
        for step, nbytes in enumerate([1000, 2000, 2000, 1000]):
            zeros = {"zeros": torch.zeros(5 * CHUNK_BYTES + nbytes, dtype=torch.uint8)}
            stats = checkpointer.save(step, zeros).result(WAIT_S)
            whole = 5 * CHUNK_BYTES + 4096 + nbytes  # the header's chunk tells the shape
            assert stats.reused_nbytes == (0, 4 * CHUNK_BYTES, whole, 4 * CHUNK_BYTES)[step]
            assert_holds(checkpointer.load(step), zeros)
    assert not [text for text in caplog.messages if "the rest is written" in text]


def test_of_what_changes_as_a_whole_little_is_hashed(memory: Path) -> None:
    """Once it stops changing, all is hashed again, and shared by the step after that."""
    with process_on(Cloning()), Checkpointer(memory, codec="reuse") as checkpointer:
        nbytes, unhashed = [], []
        for step, seed in enumerate([1, 2, 2, 2]):
            weights = {"weights": noise(3 * BLOCK_BYTES - 2 * CHUNK_BYTES, seed)}
            stats = checkpointer.save(step, weights).result(WAIT_S)
            assert_holds(checkpointer.load(step), weights)
            nbytes.append(stats.reused_nbytes)
            hashes = hashes_of(memory, step)
            unhashed.append(split(hashes, HASH_BYTES).count(NOT_HASHED))
    whole = (memory / name(0) / SHARD).stat().st_size
    block_chunks = BLOCK_BYTES // CHUNK_BYTES
    assert whole // CHUNK_BYTES == 3 * block_chunks - 2  # and one that is not whole
    looked_at = 2 * SAMPLES + (block_chunks - 1) // ((block_chunks - 1) // SAMPLES)
    assert unhashed == [0, 3 * block_chunks - 1 - looked_at, 0, 0]
    assert nbytes == [0, 0, looked_at * CHUNK_BYTES, whole]


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_shard_may_end_where_the_last_one_has_more_of_the_block(
    memory: Path, blocks: int
) -> None:
    """All of the shorter block is cloned, and has another CRC-32 than the longer one."""
    long = noise(3 * BLOCK_BYTES, 1)
    with process_on(Cloning()), Checkpointer(memory, codec="reuse") as checkpointer:
        for step, nbytes in enumerate([3 * BLOCK_BYTES, blocks * BLOCK_BYTES + 9 * CHUNK_BYTES]):
            cut = {"cut": long[: nbytes - 4096].clone()}
            stats = checkpointer.save(step, cut).result(WAIT_S)
            assert (memory / name(step) / SHARD).stat().st_size == nbytes
            assert_holds(checkpointer.load(step), cut)
    assert stats.reused_nbytes == nbytes - CHUNK_BYTES  # the header's chunk tells the shape


def test_a_job_goes_on_with_the_newest_step_of_the_last_one(memory: Path) -> None:
    with process_on(Cloning()):
        assert saved(memory, 1)[0].reused_nbytes == 0
        assert saved(memory, 2)[0].reused_nbytes > 0
        shutil.rmtree(memory / name(2))
        assert saved(memory, 3)[0].reused_nbytes > 0  # of step 1
        check(memory, 1, 3)


# ---- histories ----


class History:
    """A state that changes by chance from step to step, and what it was at each."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._seeds = itertools.count(rng.randrange(1000) * 1000)
        self.tensors: dict[str, torch.Tensor] = {}
        for number in range(rng.randint(2, 6)):
            self.tensors[f"t{number}"] = self._fresh()

    def _fresh(self) -> torch.Tensor:
        nbytes = self._rng.choice([0, 1, 4095, 40_000, CHUNK_BYTES, 700_001, 3 * MIB, 9 * MIB])
        return noise(nbytes, next(self._seeds))

    def change(self) -> None:
        rng = self._rng
        for key in [*self.tensors]:
            tensor, what = self.tensors[key], rng.randrange(8)
            if what == 0:
                self.tensors[key] = self._fresh()
            elif what == 1 and len(tensor):
                begin = rng.randrange(len(tensor))
                end = min(len(tensor), begin + rng.choice([1, 5000, 400_000]))
                self.tensors[key] = tensor.clone()
                self.tensors[key][begin:end] ^= 1 + rng.randrange(255)
            elif what == 2 and len(tensor) % 2 == 0:
                self.tensors[key] = tensor.reshape(2, -1).flatten()
            elif what == 3 and rng.random() < 0.3:
                self.tensors[key] = self.tensors.pop(key)  # goes to the end
        if rng.random() < 0.2:
            self.tensors[f"t{len(self.tensors) + 90}"] = self._fresh()

    def now(self) -> dict[str, Any]:
        return {**self.tensors, "own": PerRank(self._rng.randrange(2))}


def harm(rng: random.Random, directory: Path) -> None:
    """Does something to an older step, by its names."""
    shard, what = directory / SHARD, rng.randrange(4)
    if what == 0:
        shutil.rmtree(directory)
    elif what == 1:
        flip(shard, rng.randrange(shard.stat().st_size))
    elif what == 2:
        os.truncate(shard, rng.randrange(shard.stat().st_size))
    else:
        shard.write_bytes(b"something else")


@KINDS
def test_each_step_is_what_was_saved_whatever_becomes_of_older_ones(
    kind: str, disk: Path, memory: Path, storm: Storm
) -> None:
    reused = 0
    with place_of(kind, disk, memory) as place:
        for rng in storm.rounds(4, 100):
            history, states, root = History(rng), list[Any](), place / "run"
            checkpointer = Checkpointer(root, codec="reuse", keep_last=rng.choice([None, 2, 3]))
            for step in range(rng.randint(3, 6)):
                if rng.random() < 0.3:  # the job is started again
                    checkpointer.close()
                    checkpointer = Checkpointer(root, codec="reuse")
                states.append(history.now())
                stats = checkpointer.save(step, states[-1]).result(WAIT_S)
                last, shard = root / name(step - 1) / SHARD, root / name(step) / SHARD
                if last.exists():
                    expected = expected_nbytes(root, step - 1, step)
                    assert stats.reused_nbytes == expected <= common_nbytes(last, shard)
                reused += stats.reused_nbytes
                history.change()
            checkpointer.close()
            there = sorted(int(path.name[5:]) for path in root.glob("step-*"))
            for older, newer in itertools.pairwise(there):
                harm(rng, root / name(older))
                with Checkpointer(root) as reading:
                    for step in there[there.index(newer) :]:
                        assert_holds(reading.load(step), states[step])
            shutil.rmtree(root)
    assert reused > 0


@pytest.mark.filesystem
@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_what_is_shared_takes_no_room(disk: Path, kind: str) -> None:
    """Nor is there room for it a second time."""
    with mounted(kind, disk) as mount:
        with Checkpointer(mount / "run", codec="reuse") as checkpointer:
            for step in range(4):
                held = state(step, 140 * MIB, MIB)  # twice as much does not fit
                stats = checkpointer.save(step, held).result(WAIT_S)
            assert stats.reused_nbytes == 140 * MIB
        shutil.rmtree(mount / "run" / name(0))
        with Checkpointer(mount / "run") as checkpointer:
            assert_holds(checkpointer.load(3), held)


@pytest.mark.filesystem
def test_what_is_shared_is_durable_when_the_step_is_committed(disk: Path) -> None:
    """The file system stops at once, without writing its log, and is mounted again."""
    go_down, without_log = 0x8004587D, 2  # XFS_IOC_GOINGDOWN, XFS_FSOP_GOING_FLAGS_NOLOGFLUSH
    image, mount = disk / "xfs.img", disk / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(320 * MIB)
    run_as_root("mkfs.xfs", *MKFS_OPTIONS["xfs"], str(image))
    try:
        run_as_root("mount", "-o", "loop", str(image), str(mount))
        stats = saved(mount / "run", 1, 2)[1]
        fd = os.open(mount, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, go_down, struct.pack("=I", without_log))
        finally:
            os.close(fd)
        subprocess.run(["umount", str(mount)], check=True)
        run_as_root("mount", "-o", "loop", str(image), str(mount))
        assert stats.reused_nbytes > 0
        check(mount / "run", 1, 2)
    finally:
        subprocess.run(["umount", str(mount)], check=False)
        image.unlink()


# ---- damage ----


def test_a_bit_that_the_disk_has_flipped_is_found_in_the_new_step(memory: Path) -> None:
    with process_on(Cloning()), Checkpointer(memory, codec="reuse") as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        flip(memory / name(1) / SHARD, 3 * CHUNK_BYTES)
        assert checkpointer.save(2, state(2)).result(WAIT_S).reused_nbytes > 0
        with pytest.raises(CorruptCheckpoint, match=r"CRC-32 mismatch .*'frozen'"):
            checkpointer.load(2)
        # From now on this step is known to be damaged, and so is the one before.
        with pytest.raises(CorruptCheckpoint):
            checkpointer.load(1)
        assert checkpointer.save(3, state(3)).result(WAIT_S).reused_nbytes == 0
        assert_holds(checkpointer.load(), state(3))


@pytest.mark.parametrize("file", ["rank-00000.json", SHARD, "manifest.json"])
@pytest.mark.parametrize("what", ["cut", "gone"])
def test_a_last_step_that_cannot_be_read_is_not_reused(
    memory: Path, file: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with process_on(Cloning()):
        saved(memory, 1)
        path = memory / name(1) / file
        os.truncate(path, 5000) if what == "cut" else path.unlink()
        assert saved(memory, 2)[0].reused_nbytes == 0
        lines = [text for text in caplog.messages if "nothing is reused" in text]
        assert len(lines) == (file != "manifest.json")
        with Checkpointer(memory) as checkpointer:
            assert_holds(checkpointer.load(2), state(2))


def put_hashes(root: Path, step: int, hashes: bytes) -> None:
    """Gives an index other hashes, and every digest as it should be."""
    polyval = base64.b64encode(hashes).decode()
    Forgery(root / name(step)).index(lambda index: index["hashes"].update(polyval=polyval))


def hashes_of(root: Path, step: int) -> bytes:
    return base64.b64decode(index_of(root, step)["hashes"]["polyval"])


def test_a_wrong_hash_in_the_index(memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If chance has changed it, the index counts as damaged; signed anew, its chunk is written."""
    with process_on(Cloning()):
        saved(memory, 1)
        path = memory / name(1) / "rank-00000.json"
        content, hashes = path.read_bytes(), hashes_of(memory, 1)
        flip(path, content.index(b'"polyval":"') + 20)
        assert saved(memory, 2)[0].reused_nbytes == 0
        assert len([text for text in caplog.messages if "the index is damaged" in text]) == 1
        path.write_bytes(content)
        shutil.rmtree(memory / name(2))
        put_hashes(memory, 1, bytes([hashes[0] ^ 1]) + hashes[1:])
        assert saved(memory, 3)[0].reused_nbytes == 4 * CHUNK_BYTES
        check(memory, 1, 3)


@pytest.mark.parametrize("in_all", [True, False])
def test_a_hash_that_is_equal_though_the_bytes_are_not(memory: Path, in_all: bool) -> None:
    """If it makes a whole block equal, its CRC-32 tells, and nothing is committed; else whoever
    reads the step is told.
    """
    with process_on(Cloning()):
        saved(memory, 1, 2)
        old, new = hashes_of(memory, 1), hashes_of(memory, 2)
        shutil.rmtree(memory / name(2))
        equal = len(new) if in_all else len(new) - HASH_BYTES
        assert old[:equal] != new[:equal]
        put_hashes(memory, 1, new[:equal] + old[equal:])
        with Checkpointer(memory, codec="reuse") as checkpointer:
            error = checkpointer.save(2, state(2)).exception(WAIT_S)
            if in_all:
                assert isinstance(error, CorruptCheckpoint)
                assert "has the hash of what was to be saved, but the CRC-32" in str(error)
                assert checkpointer.steps() == [1]
                assert checkpointer.save(3, state(3)).result(WAIT_S).reused_nbytes == 0
                assert_holds(checkpointer.load(3), state(3))
            else:
                assert error is None
                with pytest.raises(CorruptCheckpoint, match="CRC-32 mismatch"):
                    checkpointer.load(2)


@pytest.mark.parametrize("in_all", [True, False])
def test_a_hash_that_is_equal_where_the_bytes_lie_though_they_are_not(
    memory: Path, in_all: bool
) -> None:
    """What has been compared before it would have been staged is told as what was staged."""
    with process_on(Cloning()), Checkpointer(memory, codec="reuse") as checkpointer:
        for step in (2, 1):
            checkpointer.save(step, state(step)).result(WAIT_S)
        old, new = hashes_of(memory, 1), hashes_of(memory, 2)
        equal = len(new) if in_all else len(new) - HASH_BYTES
        own = checkpointer._steps.own_index
        assert own is not None and own.hashes is not None and old[:equal] != new[:equal]
        hashes = own.hashes._replace(values=new[:equal] + old[equal:])
        checkpointer._steps.own_index = replace(own, hashes=hashes)
        error = checkpointer.save(3, state(2)).exception(WAIT_S)
        if in_all:
            assert isinstance(error, CorruptCheckpoint)
            assert "has the hash of what was to be saved, but the CRC-32" in str(error)
            assert checkpointer.steps() == [1, 2]
        else:
            assert error is None
            with pytest.raises(CorruptCheckpoint, match="CRC-32 mismatch"):
                checkpointer.load(3)


# ---- what is not staged ----


def test_what_has_not_changed_takes_no_staging_memory(memory: Path) -> None:
    """All is staged while no block can be written, in fewer blocks than the state has."""
    storage, nbytes = HeldAtTheFirstClone(), 6 * BLOCK_BYTES
    options: dict[str, Any] = {"staging_bytes": 2 * BLOCK_BYTES, "fence": "step"}
    with process_on(storage), Checkpointer(memory, codec="reuse", **options) as checkpointer:
        for step in (1, 2):
            handle = checkpointer.save(step, state(step, nbytes))
            handle.wait_staged(WAIT_S)
            storage.go_on.set()
            stats = handle.result(WAIT_S)
            storage.go_on.clear()
        assert stats.reused_nbytes >= nbytes and stats.staged_bytes_max <= 2 * BLOCK_BYTES
        assert_holds(checkpointer.load(2), state(2, nbytes))


def saved_unstaged(memory: Path, storage: RefusesLater, harm: Callable[[], None]) -> Any:
    """Saves step 2 beside step 1, whose bytes are not staged and cannot be cloned."""
    with process_on(storage), Checkpointer(memory, codec="reuse") as checkpointer:
        checkpointer.save(1, large(1)).result(WAIT_S)
        harm()
        storage.refuses = True
        error = checkpointer.save(2, large(2)).exception(WAIT_S)
        storage.refuses = False
        steps = checkpointer.steps()
        stats = checkpointer.save(3, large(3)).result(WAIT_S)
        assert_holds(checkpointer.load(3), large(3))
    return error, steps, stats.reused_nbytes


def test_what_was_not_staged_and_cannot_be_cloned_is_read_from_the_last_step(memory: Path) -> None:
    storage = RefusesLater()
    error, steps, reused = saved_unstaged(memory, storage, lambda: None)
    assert error is None and steps == [1, 2] and reused > 29 * MIB
    assert storage.read_of(1) > 29 * MIB
    with Checkpointer(memory) as checkpointer:
        assert_holds(checkpointer.load(2), large(2))


def test_a_last_step_that_has_changed_is_not_written_again(memory: Path) -> None:
    shard = memory / name(1) / SHARD
    error, steps, reused = saved_unstaged(
        memory, RefusesLater(), lambda: flip(shard, 9 * CHUNK_BYTES)
    )
    assert isinstance(error, CorruptCheckpoint) and steps == [1] and reused == 0
    what = rf"bytes \[{9 * CHUNK_BYTES}, {10 * CHUNK_BYTES}\) of '{shard}' do not have the hash"
    assert re.search(what, str(error)) and "[EXDEV]" in str(error)
    assert "nothing was committed" in str(error)


def test_a_last_step_that_cannot_be_read_again_fails_the_save(memory: Path) -> None:
    error, steps, _reused = saved_unstaged(memory, RefusesLater(errno.EIO), lambda: None)
    assert isinstance(error, StorageError) and steps == [1]
    assert (error.op, error.errno, error.path) == ("read", errno.EIO, f"{memory / name(1) / SHARD}")


# ---- clones that fail ----


class RefusesLater(Cloning):
    """Clones fail while it refuses; so do reads of the first step, if there is a code."""

    def __init__(self, code: int = 0) -> None:
        super().__init__()
        self.refuses, self._code = False, code

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if self.refuses and operation.name == "clone_range" and operation.args[0] > 0:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        if self.refuses and self._code and operation.name == "read" and name(1) in operation.path:
            raise OSError(self._code, os.strerror(self._code))
        return real()

    def read_of(self, step: int) -> int:
        """The bytes of a step's shard that the engine has read."""
        reads = (each for each in self.log if each.name == "read" and name(step) in each.path)
        return sum(each.args[1] for each in reads)


class Refuses(Cloning):
    """From the k-th clone on that has bytes, they fail."""

    def __init__(self, first: int, code: int) -> None:
        super().__init__()
        self._clones = itertools.count()
        self._first, self._code = first, code
        self.refused = 0

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        is_clone = operation.name == "clone_range" and operation.args[0] > 0
        if is_clone and next(self._clones) >= self._first:
            self.refused += 1
            raise OSError(self._code, os.strerror(self._code))
        return real()


def large(step: int) -> Any:
    return state(step, 30 * MIB)


class Full(Cloning):
    """A file system with 1 MiB left, which takes no block of a shard any more."""

    is_full = False

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        return MIB if operation.name == "free_bytes" else real()  # type: ignore[return-value]

    def attempt(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        if self.is_full and kind == "write" and path_of(fd).endswith(".safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().attempt(kind, fd, memory, offset)


def test_a_shortage_tells_what_is_needed_and_left(memory: Path) -> None:
    """Though no room is taken ahead."""
    storage = Full()
    with process_on(storage), Checkpointer(memory, codec="reuse") as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        storage.is_full = True
        room = r"up to [\d.]+ KiB are needed and 1\.00 MiB are left on the file system"
        with pytest.raises(StorageError, match=room) as told:
            checkpointer.save(2, state(2)).result(WAIT_S)
        assert told.value.path.endswith("step-00000002/rank-00000.safetensors")
        storage.is_full = False


# ---- beside others ----


def test_retention_beside_reuse(memory: Path) -> None:
    with process_on(Cloning()):
        stats = saved(memory, 1, 2, 3, 4, keep_last=1)
        assert all(each.reused_nbytes > 0 for each in stats[1:])
        check(memory, 4)


class HeldAtTheFirstClone(Cloning):
    """The first clone that has bytes waits for an event."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == "clone_range" and operation.args[0] > 0:
            self.reached.set()
            assert self.go_on.wait(WAIT_S)
        return real()


def test_a_step_that_is_removed_while_it_is_reused(memory: Path) -> None:
    storage = HeldAtTheFirstClone()
    with process_on(storage), Checkpointer(memory, codec="reuse") as checkpointer:
        checkpointer.save(1, state(1)).result(WAIT_S)
        handle = checkpointer.save(2, state(2))
        assert storage.reached.wait(WAIT_S)
        # Nobody holds it: retention, of another process too, need not wait for a save.
        assert checkpointer._steps.remove_unread(name(1), checkpointer._steps.read(name(1)).nonce)
        assert directories(memory) == [name(2)]
        storage.go_on.set()
        assert handle.result(WAIT_S).reused_nbytes > 0
        check(memory, 2)


def test_in_a_local_tier_steps_are_reused_and_the_root_gets_all(
    disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == os.stat(disk).st_dev:
        pytest.skip("there is no second file system")
    local = Path("/dev/shm") / f"fastckpt-reuse-{os.getpid()}"
    try:
        with process_on(Cloning()):
            stats = saved(disk, 1, 2, local=local)
            assert stats[1].reused_nbytes > 0 and stats[1].local_committed_s is not None
            check(disk, 1, 2)
            (tier,) = [path for path in local.iterdir() if path.is_dir()]
            shard = f"{name(2)}/{SHARD}"
            assert (tier / shard).read_bytes() == (disk / shard).read_bytes()
            # The root's steps have their hashes, too: past the tier they are reused from there.
            assert saved(disk, 3)[0].reused_nbytes > 0
            check(disk, 1, 2, 3)
    finally:
        shutil.rmtree(local, ignore_errors=True)


def of_rows(step: int) -> dict[str, torch.Tensor]:
    held = state(step, 4 * MIB, MIB)
    return {key: held[key].view(64, -1) for key in ("frozen", "moving")}


def save_rows(member: Member, root: Path, steps: list[int]) -> None:
    """Saves steps whose tensors are distributed over the ranks by their rows."""
    with Checkpointer(root, group=member.group, codec="reuse", log=True) as checkpointer:
        for step in steps:
            rows = {key: spread_by_group(member, held) for key, held in of_rows(step).items()}
            checkpointer.save(step, rows).result(WAIT_S)


@pytest.mark.filesystem
@pytest.mark.multiprocess
def test_ranks_reuse_their_own_shards(nursery: Nursery, disk: Path) -> None:
    """Another number of ranks has other shards: what is not found in them is written."""
    with mounted("xfs", disk) as mount:
        for ranks, steps in ((2, [1, 2]), (1, [3, 4]), (2, [5, 6])):
            nursery.lasting_crew(ranks)(save_rows, mount, steps)
        with Checkpointer(mount) as checkpointer:
            for step in range(1, 7):
                assert_holds(checkpointer.load(step), of_rows(step))
        entries = save_log.entries(Storage(), str(mount))
    reused = [entry["by_rank"]["reused_nbytes"] for entry in entries]
    assert reused[0] == [0, 0] and [len(each) for each in reused] == [2, 2, 1, 1, 2, 2]
    for number in (1, 3, 5):
        assert sum(reused[number]) >= 4 * MIB - len(reused[number]) * CHUNK_BYTES


# ---- failures and the last operation ----


class Prepared(NamedTuple):
    """A root with step 1, and what the one who saved that knows of it."""

    root: Path
    own: ShardIndex | None


def prepared(live: Path) -> Prepared:
    with process_on(Cloning()), Checkpointer(live / "run", codec="reuse", durable=False) as first:
        first.save(1, state(1)).result(WAIT_S)
        return Prepared(live / "run", first._steps.own_index)


IN_PLACE = pytest.mark.parametrize("in_place", [True, False], ids=["in place", "staged"])


def save_second(before: Prepared, storage: Storage, in_place: bool) -> BaseException | None:
    """Saves step 2, in the job that has saved step 1, so that what both have in common is not
    staged; or else in another one.
    """
    with process_on(storage):
        checkpointer = Checkpointer(before.root, codec="reuse", keep_last=1)
        checkpointer._steps.own_index = before.own if in_place else None
        handle = checkpointer.save(2, state(2))
        error = handle.exception(WAIT_S)
        with nullcontext() if error is None else pytest.raises(BaseException):
            checkpointer.close()
            handle.result()
    return error


def content_of(root: Path) -> int | None:
    """Which step a restore takes, every value of which was looked at, as of all others."""
    with Checkpointer(root) as checkpointer:
        for step in checkpointer.steps():
            assert_holds(checkpointer.load(step), state(step))
        return checkpointer.latest()


def go_on(root: Path) -> None:
    """The next job saves step 3, reusing whatever there is."""
    with process_on(Cloning()):
        saved(root, 3, durable=False, keep_last=1)
    check(root, 3)


# A save does without these: it then writes everything, or they are of retention.
DISPENSABLE = {"lock", "lock shared", "close", "names", "names directories", "status"} | {
    *("status link", "open", "open regular", "read_file", "read_at", "fstat"),
    "clone_range",
}


@IN_PLACE
def test_every_operation_may_fail(memory: Path, at_once: None, in_place: bool) -> None:
    failed = set()
    for number in itertools.count():
        before = prepared(memory / str(number))
        storage, root = CloningFailAt(number, errno.EIO), before.root
        error = save_second(before, storage, in_place)
        if number >= len(storage.log):
            break
        operation, names = storage.log[number], storage.names_logged()
        failed.add(operation.name)
        what = f"operation {number}, {operation}, failed"
        if error is None:
            is_late = "rename" in names and number > names.index("rename")
            assert is_late or operation.name in DISPENSABLE, f"{what}: swallowed"
        else:
            assert isinstance(error, StorageError) and error.errno == errno.EIO, what
        assert content_of(root) == (2 if error is None or error.visible else 1), what
        go_on(root)
        shutil.rmtree(memory / str(number))
    assert {"truncate", "write_at", "open regular", "sync", "rename"} <= failed
    assert in_place or "clone_range" in failed  # when the engine clones is left to chance


def leave_second(before: Prepared, in_place: bool) -> None:
    """Saves step 2 by a Checkpointer that is forgotten then, so that it leaves no lease."""
    checkpointer = Checkpointer(before.root, codec="reuse", keep_last=1)
    checkpointer._steps.own_index = before.own if in_place else None
    checkpointer.save(2, state(2)).exception(WAIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@IN_PLACE
def test_any_operation_may_be_the_last(memory: Path, in_place: bool) -> None:
    owner, told = dead_pid(), set()
    seen: dict[int, int | None] = {}
    for count in itertools.count():
        live = memory / "live"
        before = prepared(live)
        storage = CloningCrash(live, count)
        with process_on(storage), suppress(PowerCut):  # what it is for
            leave_second(before, in_place)
        if count > len(storage.log):
            break
        names = storage.names_logged()
        renamed = names.index("rename") if "rename" in names else len(names)
        for label, image in storage.images(SEED + count):
            key = hash(tuple(image.items()))
            if key not in seen:
                plant(image, memory / "after", owner)
                seen[key] = content_of(memory / "after" / "run")
                if len(seen) % 5 == 0:
                    go_on(memory / "after" / "run")
                shutil.rmtree(memory / "after")
            told.add(seen[key])
            assert seen[key] == 1 or count > renamed, f"{count} operations, {label}"
            assert seen[key] in (1, 2), f"{count} operations, {label}"
        shutil.rmtree(live)
    assert told == {1, 2} and len(seen) > 20


def test_a_chunk_is_compared_with_one_that_ends_at_the_same_byte() -> None:
    """Hashes do not tell how many zeros come first."""
    hashes = ChunkHashes(
        b"k" * 16, CHUNK_BYTES, b"".join(bytes([n]) * HASH_BYTES for n in range(3))
    )
    for nbytes, other, chunks in (
        (3 * CHUNK_BYTES, 3 * CHUNK_BYTES, 3),
        (3 * CHUNK_BYTES - 5, 3 * CHUNK_BYTES - 5, 3),
        (2 * CHUNK_BYTES + 4096, 3 * CHUNK_BYTES, 2),
        (3 * CHUNK_BYTES, 2 * CHUNK_BYTES + 4096, 2),
    ):
        comparable = _comparable(OtherFile(-1, "", other, hashes), nbytes)
        assert comparable == hashes.values[: chunks * HASH_BYTES]
