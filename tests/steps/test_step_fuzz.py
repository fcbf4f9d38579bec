"""Step directories that are damaged by chance or made to do harm: every byte and length of small
files, files that are exchanged or are none, and manifests and indexes that are signed anew after
they were changed. A load gives what was saved or one of our errors, in little memory, and touches
nothing outside the directory. The formats by themselves are test_step_formats.py's business.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import random
import re
import shutil
import socket
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard

from fastckpt import Checkpointer, PerRank, SaveOptions
from fastckpt.errors import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint, StorageError
from fastckpt.formats.shard_index import shard_name
from fastckpt.state.tree import ESCAPED, PER_RANK, TENSOR
from tests.kit.forgeries import WAIT_S, Forgery, Harm, little_memory, small_shards
from tests.kit.storm import Storm

SEED = 20261120
FILES = ("manifest.json", "rank-00000.json", "rank-00000.safetensors", "objects.pt")
DAMAGE = (CorruptCheckpoint, IncompatibleCheckpoint, StorageError)
STEP = "step-00000005"


def state(number: int) -> dict[str, Any]:
    return {
        "w": torch.arange(60, dtype=torch.float32).reshape(6, 10) + number,
        "b": [torch.arange(7, dtype=torch.int16) + number],
        "own": PerRank((number, "mine")),
        "number": number,
    }


def shown(found: dict[str, Any]) -> str:
    """All of a state that was loaded, as text."""
    own = found["own"]
    value = own.value if isinstance(own, PerRank) else own
    return f"{found['w'].tolist()} {found['b'][0].tolist()} {value} {found['number']}"


EXPECTED = {number: shown(state(number)) for number in (1, 2, 3)}


def saved(root: Path, number: int, step: int = 5, **options: Any) -> Path:
    with (
        small_shards(),
        Checkpointer(root, options=SaveOptions(durable=False), **options) as checkpointer,
    ):
        checkpointer.save(step, state(number)).result(WAIT_S)
    return root / f"step-{step:08d}"


@pytest.fixture
def directory(disk: Path) -> Path:
    """Of a step with small files, the only one under its root."""
    return saved(disk / "run", 1)


def outcome(root: Path, number: int = 1) -> str:
    """What comes of loading: "whole", or the kind of error. Anything else fails here."""
    with Checkpointer(root) as checkpointer:
        assert checkpointer.steps() in ([], [5]) and checkpointer.latest() in (None, 5)
        target = state(0)
        try:
            loaded = checkpointer.load()
        except CheckpointError as error:
            assert isinstance(error, DAMAGE) or "no committed step" in str(error), repr(error)
            with pytest.raises(DAMAGE) if isinstance(error, DAMAGE) else nothing():
                step = checkpointer.restore(target)
                assert step is None
            return type(error).__name__
        assert shown(loaded) == EXPECTED[number]
        assert checkpointer.restore(target) == 5 and shown(target) == EXPECTED[number]
        return "whole"


@contextmanager
def nothing() -> Iterator[None]:
    yield


def loads_or_raises(root: Path, number: int = 1) -> str:
    """As outcome(), by one load()."""
    try:
        with Checkpointer(root) as checkpointer:
            loaded = checkpointer.load()
    except CheckpointError as error:
        return type(error).__name__
    assert shown(loaded) == EXPECTED[number], "something else came back"
    return "whole"


# ---- chance ----


@pytest.mark.parametrize(
    ("file", "codec"),
    [
        *((file, None) for file in FILES),
        (shard_name(0, "zstd"), "zstd"),
        (shard_name(0, "planes"), "planes"),
    ],
)
def test_flipped_bytes(disk: Path, file: str, codec: str | None, storm: Storm) -> None:
    """Every byte of the JSON files; of the others many that are not padding, and some of it."""
    directory = saved(disk / "run", 1, codec=codec)
    path = directory / file
    content = path.read_bytes()
    rng = random.Random(SEED)
    places = list(range(len(content)))
    if len(content) > 2000:
        dense = [n for n in places if any(content[n - 2 : n + 3])]
        places = sorted(rng.sample(dense, min(300, len(dense))) + rng.sample(places, 100))
    places = storm.some(places, 70)
    outcomes: Counter[str] = Counter()
    with path.open("r+b", buffering=0) as opened:
        for place in places:
            os.pwrite(opened.fileno(), bytes([content[place] ^ 1 << rng.randrange(8)]), place)
            result = loads_or_raises(disk / "run")
            outcomes[result] += 1
            os.pwrite(opened.fileno(), content[place : place + 1], place)
            if codec is None:
                assert result == "CorruptCheckpoint", f"byte {place}: {result}"
    assert loads_or_raises(disk / "run") == "whole"
    assert set(outcomes) <= {"CorruptCheckpoint", "whole"}
    assert outcomes["CorruptCheckpoint"] > len(places) / 3


@pytest.mark.parametrize("file", FILES)
def test_other_lengths(directory: Path, file: str, storm: Storm) -> None:
    path = directory / file
    content = path.read_bytes()
    step = 1 if len(content) < 2000 else 61
    for length in storm.some([*range(0, len(content), step), len(content) - 1], 60):
        path.write_bytes(content[:length])
        assert loads_or_raises(directory.parent) == "CorruptCheckpoint", length
    for more in (b"\0", b"\n", b" " * 4096, content):
        path.write_bytes(content + more)
        assert loads_or_raises(directory.parent) == "CorruptCheckpoint", more[:9]
    path.unlink()
    expected = "CheckpointError" if file == "manifest.json" else "CorruptCheckpoint"
    assert outcome(directory.parent) == expected


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_large_shard(disk: Path, codec: str | None) -> None:
    """Damage is named by its block and tensor; the others still load."""
    generator = torch.Generator().manual_seed(SEED)
    values = {n: torch.rand(3_000_000, generator=generator) for n in ("a", "b", "c")}
    with Checkpointer(disk / "run", codec=codec) as checkpointer:
        checkpointer.save(5, values)
        checkpointer.restore(found := {n: torch.zeros(3_000_000) for n in values})
        assert all(torch.equal(found[n], values[n]) for n in values)
        (path,) = (disk / "run" / STEP).glob("*.safetensors*")
        place = 4096 + 14_000_000  # of the second tensor, in the second block
        content = path.read_bytes()
        os.truncate(path, len(content))
        with path.open("r+b", buffering=0) as opened:
            os.pwrite(opened.fileno(), bytes([content[place] ^ 1]), place)
        with pytest.raises(CorruptCheckpoint, match=re.escape(str(path))) as caught:
            checkpointer.load()
        if codec is None:
            assert "in bytes 8388608 to 16777216, in 'a', 'b'" in str(caught.value) or (
                "in bytes 8388608 to 16777216, in 'b'" in str(caught.value)
            )
        checkpointer.restore({"c": found["c"]})
        assert torch.equal(found["c"], values["c"])
        with pytest.raises(CorruptCheckpoint):
            checkpointer.restore({"b": found["b"]})


def test_exchanged_blocks(disk: Path) -> None:
    """Frames of equal size change places: each is whole, and not the one that should be there."""
    values = {"w": torch.rand(6 << 20, generator=torch.Generator().manual_seed(SEED))}
    with Checkpointer(disk / "run", codec="zstd") as checkpointer:
        checkpointer.save(5, values)
        checkpointer.load()
    path = disk / "run" / STEP / "rank-00000.safetensors.zst"
    index = json.loads((path.parent / "rank-00000.json").read_text())
    first, second, *_ = index["frames"]
    content = path.read_bytes()
    changed = content[first : first + second] + content[:first] + content[first + second :]
    path.write_bytes(changed)
    index["frames"][:2] = [second, first]
    Forgery(path.parent).index(lambda written: written.update(frames=index["frames"]))
    with Checkpointer(disk / "run") as checkpointer, pytest.raises(CorruptCheckpoint):
        checkpointer.load()


def test_files_of_two_steps_never_mix(disk: Path) -> None:
    """Any of the files may come from another step, of the same shapes, under the same number."""
    first, second = saved(disk / "a", 1), saved(disk / "b", 2)
    mixed = disk / "mixed" / STEP
    mixed.mkdir(parents=True)
    for chosen in itertools.product((first, second), repeat=len(FILES)):
        for source, file in zip(chosen, FILES, strict=True):
            shutil.copy(source / file, mixed / file)
        if len(set(chosen)) == 1:
            assert outcome(disk / "mixed", 1 if chosen[0] is first else 2) == "whole"
        else:
            assert outcome(disk / "mixed") == "CorruptCheckpoint"


# ---- files that are none ----


class Canary:
    """Files outside the root that tell whether anybody read or changed them."""

    def __init__(self, directory: Path, like: Path) -> None:
        shutil.copytree(like, directory)
        os.mkfifo(directory / "pipe")
        (directory / "secret").write_bytes(b"secret" * 100)
        self._directory = directory
        self._rewind()
        self._before = self._now()
        (directory / "secret").read_bytes()
        self.sees_reads = self._now() != self._before
        self._rewind()
        self._before = self._now()

    def _rewind(self) -> None:
        for path in self._directory.iterdir():
            mtime_ns = path.stat().st_mtime_ns
            os.utime(path, ns=(mtime_ns - 10**15, mtime_ns))  # so that reading moves it (relatime)

    def _now(self) -> dict[str, tuple[int, int, int, int]]:
        found = {}
        for path in self._directory.iterdir():
            s = path.stat()
            found[path.name] = (s.st_ino, s.st_size, s.st_mtime_ns, s.st_atime_ns)
        return found

    def check(self) -> None:
        assert self._now() == self._before, "something outside the directory was touched"


@pytest.fixture
def canary(disk: Path, directory: Path) -> Iterator[Canary]:
    made = Canary(disk / "outside", directory)
    yield made
    made.check()


def put(path: Path, kind: str, outside: Path) -> None:
    """Puts something that is no file in the place of a file."""
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the address of a socket is short
        try:
            with socket.socket(socket.AF_UNIX) as opened:
                opened.bind(path.name)
        finally:
            os.chdir(here)
    else:
        targets = {
            "itself": path.name,
            "nowhere": "nowhere",
            "a pipe": outside / "pipe",
            "its copy": outside / path.name,
            "its neighbour": "objects.pt" if path.name != "objects.pt" else "manifest.json",
            "zeros": "/dev/zero",
        }
        path.symlink_to(targets[kind])


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "kind",
    [
        *("directory", "fifo", "socket", "itself", "nowhere"),
        *("a pipe", "its copy", "its neighbour", "zeros"),
    ],
)
def test_what_is_no_file_is_not_opened(
    disk: Path, directory: Path, canary: Canary, file: str, kind: str
) -> None:
    put(directory / file, kind, disk / "outside")
    assert outcome(directory.parent) in ("CorruptCheckpoint", "StorageError")
    # Neither does it stop the next save, nor does that follow it when it cleans up.
    saved(directory.parent, 2, keep_last=1)
    assert outcome(directory.parent, 2) == "whole"
    canary.check()


def test_the_canary_sings(canary: Canary, disk: Path) -> None:
    (disk / "outside" / "objects.pt").write_bytes((disk / "outside" / "objects.pt").read_bytes())
    with pytest.raises(AssertionError, match="touched"):
        canary.check()
    canary.__dict__["check"] = lambda: None


# ---- what was signed anew ----


def test_signing_anew_changes_nothing(directory: Path) -> None:
    forged = Forgery(directory)
    nest = torch.load(directory / "objects.pt")
    forged.manifest(lambda _: None)
    forged.index(lambda _: None)
    forged.objects(nest)
    forged.shard((directory / "rank-00000.safetensors").read_bytes())
    assert outcome(directory.parent) == "whole"


Change = Callable[[Forgery], Any]


def piece(number: int, **changes: Any) -> Change:
    return lambda f: f.index(lambda i: i["pieces"][number].update(changes))


def whole_index(**changes: Any) -> Change:
    return lambda f: f.index(lambda i: i.update(changes))


def whole_manifest(**changes: Any) -> Change:
    return lambda f: f.manifest(lambda m: m.update(changes))


def writer(**changes: Any) -> Change:
    return lambda f: f.manifest(lambda m: m["writers"][0].update(changes))


def objects(**changes: Any) -> Change:
    return lambda f: f.manifest(lambda m: m["objects"].update(changes))


def add_piece(**changes: Any) -> Change:
    return lambda f: f.index(lambda i: i["pieces"].append(i["pieces"][0] | changes))


def second_writer(**changes: Any) -> Change:
    """The same files once more, as if another rank had written them, too."""

    def change(f: Forgery) -> None:
        index = json.loads((f.directory / "rank-00000.json").read_bytes()) | {"rank": 1} | changes
        source = f.directory / "rank-00000.safetensors"
        shutil.copy(source, f.directory / "rank-00001.safetensors")
        content = json.dumps(index | {"file": "rank-00001.safetensors"}).encode()
        (f.directory / "rank-00001.json").write_bytes(content)

        def add(m: dict[str, Any]) -> None:
            more = {
                "rank": 1,
                "file": "rank-00001.safetensors",
                "index": "rank-00001.json",
                "index_nbytes": len(content),
                "index_sha256": hashlib.sha256(content).hexdigest(),
            }
            m.update(world_size=2, writers=[m["writers"][0], m["writers"][0] | more])

        f.manifest(add)

    return change


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def placed(**changes: Any) -> Change:
    """The placeholder of w says something else."""

    def change(f: Forgery) -> None:
        nest = torch.load(f.directory / "objects.pt")
        nest["w"].update(changes)
        f.objects(nest)

    return change


def nest_with(value: Any) -> Change:
    return lambda f: f.objects(torch.load(f.directory / "objects.pt") | {"w": value})


FORGERIES: dict[str, Change] = {
    "file elsewhere": writer(file="../../outside/secret"),
    "index elsewhere": writer(index="../../outside/secret"),
    "objects elsewhere": objects(file="../../outside/secret"),
    "file of the index elsewhere": whole_index(file="../../outside/secret"),
    "index is objects": writer(index="objects.pt"),
    "index is the shard": writer(index="rank-00000.safetensors"),
    "objects is missing": objects(file="other.pt"),
    "objects is the shard": objects(file="rank-00000.safetensors"),
    "another step": whole_manifest(step=6),
    "sequence without a next": whole_manifest(sequence=(1 << 63) - 1),
    "no writers": whole_manifest(writers=[]),
    "nonce": whole_manifest(nonce="0" * 32),
    "nonce of index": whole_index(nonce="0" * 32),
    "huge file": writer(nbytes=1 << 62),
    "huge index": writer(index_nbytes=1 << 62),
    "huge objects": objects(nbytes=1 << 62),
    "empty objects": objects(nbytes=0),
    "crc of objects": objects(crc32="00000000"),
    "span of nothing": writer(span=[0.0, 0.0]),
    "no keys": writer(keys=""),
    "keys of others": writer(keys="AAAAAA=="),
    "same files twice": second_writer(),
    "size beyond the file": whole_index(nbytes=1 << 40),
    "size below the file": whole_index(nbytes=4096),
    "wrong checksum": whole_index(crc32="00000000"),
    "frame of all": whole_index(codec="zstd", frames=[1 << 62]),
    "no pieces": whole_index(pieces=[]),
    "shape larger": piece(0, shape=[7, 10]),
    "shape transposed": piece(0, shape=[10, 6]),
    "size smaller": piece(0, size=[5, 10]),
    "at beyond": piece(0, at=1 << 62),
    "at the end": piece(0, at=4200),
    "another dtype": piece(0, dtype="F64"),
    "another dtype of as many bytes": piece(0, dtype="I32"),
    "another dtype of fewer bytes": piece(0, dtype="BF16"),
    "another key": piece(0, key="v"),
    "key of another": piece(0, key="b/0"),
    "a piece twice": add_piece(),
    "a piece over it": add_piece(key="v"),
    "an empty piece elsewhere": add_piece(key="v", size=[0, 10], at=1 << 61),
    "rows twice": lambda f: f.index(
        lambda i: i["pieces"].append(
            i["pieces"][0] | {"offset": [5, 0], "size": [1, 10], "at": i["nbytes"] - 40}
        )
    ),
    "own beyond": whole_index(per_rank=[1 << 62, 5]),
    "placeholder larger": placed(shape=[60, 10]),
    "placeholder huge": placed(shape=[1 << 30, 1 << 20]),
    "placeholder empty and huge": placed(shape=[0, 1 << 62, 1 << 62]),
    "placeholder of nothing": placed(**{TENSOR: "nothing"}),
    "placeholder of a list": placed(**{TENSOR: ["w"]}),
    "placeholder of half a surrogate": placed(**{TENSOR: "\ud800"}),
    "placeholder dtype": placed(dtype=["F32"]),
    "placeholder shape": placed(shape=None),
    "nest too deep": nest_with(nested(450)),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_refused(directory: Path, canary: Canary, name: str) -> None:
    assert outcome(directory.parent) == "whole"
    FORGERIES[name](Forgery(directory))
    with little_memory():
        assert outcome(directory.parent) in ("CorruptCheckpoint", "IncompatibleCheckpoint")
    canary.check()


# What is signed right, fits together and can be read, is read: as whoever signed it wants.
HARMLESS: dict[str, Change] = {
    "block of 64 MiB": whole_index(block_bytes=1 << 26),
    "block of a page less": whole_index(block_bytes=(1 << 26) - 4096),
    "other time": whole_manifest(created="2036-01-31T12:00:00.123+00:00"),
    "other place in the order": whole_manifest(sequence=1 << 62),
    "more ranks": whole_manifest(world_size=1 << 40),
    "span of all": writer(span=[0.0, 1.0]),
    "any keys": writer(keys=None),
    "a tensor nobody asks for": add_piece(key="v", shape=[0, 10], size=[0, 10]),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_forgeries_that_change_nothing(directory: Path, canary: Canary, name: str) -> None:
    HARMLESS[name](Forgery(directory))
    with little_memory():
        assert outcome(directory.parent) == "whole"


@pytest.mark.parametrize(
    "value",
    [
        {PER_RANK: ["own"]},
        {PER_RANK: None},
        {PER_RANK: "nobody's"},
        {ESCAPED: 5},
        {ESCAPED: {TENSOR: 5}},
        {},
        [],
        nested(150),
        torch.zeros(6, 9),
        torch.empty(0),
    ],
    ids=lambda value: re.sub(r"\W+", " ", str(value))[:40],
)
def test_objects_that_do_not_fit_are_no_accident(directory: Path, value: Any) -> None:
    """A restore tells that it does not fit and leaves the state; a load gives what there is."""
    nest_with(value)(Forgery(directory))
    with Checkpointer(directory.parent) as checkpointer:
        target = state(3)
        with pytest.raises(DAMAGE):
            checkpointer.restore(target)
        assert shown(target) == EXPECTED[3]
        target["w"], target["own"] = PerRank(), torch.zeros(1)
        with pytest.raises(DAMAGE):
            checkpointer.restore(target)
        try:
            assert checkpointer.load()["number"] == 1
        except DAMAGE:
            assert TENSOR in str(value)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
def test_no_code_runs_from_a_step(disk: Path, directory: Path) -> None:
    forged = Forgery(directory)
    forged.objects({"w": Harm(disk / "executed")})
    with Checkpointer(directory.parent) as checkpointer:
        for call in (checkpointer.load, lambda: checkpointer.restore({"w": 1})):
            with pytest.raises(pickle.UnpicklingError):
                call()
        assert not (disk / "executed").exists()
        checkpointer.load(weights_only=False)
        assert (disk / "executed").exists(), "the trace would be seen"
    directory = saved(disk / "other", 1)
    forged = Forgery(directory)
    content = (directory / "rank-00000.safetensors").read_bytes()
    for own in (pickle.dumps(Harm(disk / "again")), b"no zip", b"", b"PK\x03\x04" * 9):
        begin = len(content)
        forged.shard(content + own, per_rank=[begin, len(own)])
        with (
            Checkpointer(directory.parent) as checkpointer,
            pytest.raises((pickle.UnpicklingError, RuntimeError)),  # torch's, or ours
        ):
            checkpointer.load()
    assert not (disk / "again").exists()


def test_a_frame_that_unpacks_to_more(disk: Path) -> None:
    """A frame of 2 GiB of zeros in the place of a block."""
    directory = saved(disk / "run", 1, codec="zstd")
    path = directory / "rank-00000.safetensors.zst"
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    chunk = bytes(1 << 20)
    parts = [compressor.compress(chunk) for _ in range(2048)]
    bomb = b"".join([*parts, compressor.flush()])
    padding = -len(bomb) % 4096 or 4096
    bomb += b"\x50\x2a\x4d\x18" + (padding - 8).to_bytes(4, "little") + bytes(padding - 8)
    path.write_bytes(bomb)
    forged = Forgery(directory)
    forged.manifest(lambda m: m["writers"][0].update(nbytes=len(bomb)))
    forged.index(lambda i: i.update(file_nbytes=len(bomb), frames=[len(bomb)]))
    with little_memory():
        assert outcome(directory.parent) == "CorruptCheckpoint"


def test_per_rank_values_that_are_cut_off(disk: Path) -> None:
    """Bytes that their checksums are right of, and are no zip that torch reads."""
    directory = saved(disk / "run", 1)
    index = json.loads((directory / "rank-00000.json").read_bytes())
    begin, nbytes = index["per_rank"]
    content = (directory / "rank-00000.safetensors").read_bytes()
    forged = Forgery(directory)
    for left in (nbytes - 1, nbytes // 2, 4, 1):
        forged.shard(content[: begin + left], per_rank=[begin, left])
        with Checkpointer(directory.parent) as checkpointer:
            with pytest.raises((CorruptCheckpoint, pickle.UnpicklingError), match="of rank 0 in"):
                checkpointer.load()
            with pytest.raises((CorruptCheckpoint, pickle.UnpicklingError)):
                checkpointer.load(weights_only=False)


@pytest.mark.parametrize("codec", [None, "zstd", "planes"])
def test_values_of_a_rank_take_what_the_file_bears_out(disk: Path, codec: str | None) -> None:
    """A size that is only declared is never allocated."""
    directory = saved(disk / "run", 1, codec=codec)
    name = shard_name(0, codec)
    frame = (directory / name).read_bytes()
    forged, block, blocks = Forgery(directory), 1 << 26, 64
    with open(directory / name, "r+b") as file:
        file.truncate(len(frame) * blocks if codec else block * blocks)
    nbytes, stored = block * blocks, os.path.getsize(directory / name)
    forged.manifest(lambda m: m["writers"][0].update(nbytes=stored))
    changes: dict[str, Any] = {"nbytes": nbytes, "file_nbytes": stored, "block_bytes": block}
    changes |= {"crc32": "0" * 8 * blocks, "frames": [len(frame)] * blocks if codec else []}
    forged.index(lambda i: i.update(per_rank=[1 << 20, nbytes - (1 << 20)], pieces=[], **changes))
    tracemalloc.start()
    try:
        with Checkpointer(directory.parent) as checkpointer, pytest.raises(CorruptCheckpoint):
            checkpointer.load()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 256 << 20, "of 4 GiB"


def test_no_memory_for_the_values_of_a_rank(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved(disk / "run", 1)

    def none_left(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("fastckpt.steps.load.StepReader._read_file", none_left)
    failed = pytest.raises(StorageError, match=r"values from .*rank-0.* failed.*ENOMEM")
    with Checkpointer(directory.parent) as checkpointer, failed:
        checkpointer.load()


def test_objects_that_share_themselves(directory: Path) -> None:
    """Some hundred bytes that would be 2^40 lists."""
    value: Any = [1, 2]
    for _ in range(40):
        value = [value, value]
    nest_with(value)(Forgery(directory))
    target = state(3) | {"w": None, "b": 5}
    with little_memory(), Checkpointer(directory.parent) as checkpointer:
        loaded = checkpointer.load()
        assert checkpointer.restore(target) == 5
    for found in (loaded["w"], target["w"]):
        assert found[0] is found[1] and found[0][1] is found[1][0]


def test_a_step_is_saved_after_one_that_claims_the_last_place(directory: Path) -> None:
    whole_manifest(sequence=(1 << 63) - 1)(Forgery(directory))
    saved(directory.parent, 2, step=6)
    with Checkpointer(directory.parent) as checkpointer:
        assert checkpointer.latest() == 6 and shown(checkpointer.load()) == EXPECTED[2]


VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 5, 4096, 4097, 8 << 20, 1 << 30, 1 << 31, 1 << 62, 1 << 63),
    *(
        0.0,
        0.5,
        1.0,
        1e308,
        "",
        "a",
        "0" * 8,
        "0" * 64,
        "F32",
        "w",
        "objects.pt",
        "rank-00000.json",
    ),
    *([], [0], [6, 10], [1 << 40], [0.0, 1.0], {}, {"key": "w"}, "\ud800", "\0", "../x"),
]


def places(value: Any, inside: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in a JSON value."""
    if inside:
        yield inside
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*inside, key))


def test_random_forgeries(disk: Path, directory: Path, canary: Canary, storm: Storm) -> None:
    """One or two random values, lists cut or doubled: refused, or read as it says."""
    rng = random.Random(SEED)
    original = disk / "original"
    shutil.copytree(directory, original)
    outcomes: Counter[str] = Counter()

    def change(written: dict[str, Any]) -> None:
        for _ in range(rng.choice((1, 1, 2))):
            candidates = list(places(written))
            *above, last = rng.choice(candidates)
            inside: Any = written
            for key in above:
                inside = inside[key]
            if isinstance(inside[last], list) and rng.getrandbits(1):
                inside[last] = inside[last] * 2 if rng.getrandbits(1) else inside[last][:-1]
            elif isinstance(inside[last], int) and rng.getrandbits(1):
                inside[last] += rng.choice((-1, 1, -4096, 4096))
            else:
                inside[last] = rng.choice(VALUES)

    with little_memory():
        rounds = storm.some(range(700), 200)
        for number in rounds:
            for file in ("manifest.json", "rank-00000.json"):
                shutil.copy(original / file, directory / file)
            forged = Forgery(directory)
            (forged.index if number % 2 else forged.manifest)(change)
            with Checkpointer(directory.parent) as checkpointer:
                for call in (checkpointer.load, lambda: checkpointer.restore(state(0))):
                    try:
                        call()
                        outcomes["read"] += 1
                    except (CheckpointError, pickle.UnpicklingError) as error:
                        outcomes[type(error).__name__] += 1
                    except RuntimeError as error:  # what torch says of bytes that are no zip
                        assert "PytorchStreamReader" in str(error)
    canary.check()
    assert outcomes["CorruptCheckpoint"] > len(rounds), outcomes
    assert outcomes["read"] > len(rounds) / 35, outcomes
