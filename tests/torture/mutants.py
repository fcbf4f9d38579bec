"""Mutants of every format that is read, given to its reader.

    python -m tests.torture.mutants --count 200000 --seed n

Responsible for the seeds, the mutations and what may come of a reader: a value or one of our
errors, within memory and time. The number of the mutant and the seed repeat what failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import pickle
import random
import resource
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

LIMIT_S = 120  # of a hundred mutants; whatever takes longer hangs
TIMES_MAX, ROOM = 10, 200 << 20  # of memory: so many times the file, and this
NUMBERS = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 1 << 31, 0xFFFFFFFF, 1 << 62, (1 << 64) - 1)
Reader = Callable[[bytes], object]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Returns content with some bytes replaced, left out, put in, repeated or cut off."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) + 1)
        end = min(len(changed), at + rng.choice((0, 1, 1, 4, 8, 30)))
        other = rng.randrange(len(changed) + 1)
        width = rng.choice("BHIQ")
        number = rng.choice(NUMBERS) % (1 << 8 * struct.calcsize(width))
        fillings = (
            rng.randbytes(end - at),
            b"",
            rng.randbytes(4),
            bytes(changed[other : other + 9]),
            struct.pack(f"<{width}", number),
            struct.pack("<I", len(changed)),
        )
        filling = rng.choice(fillings)
        changed[at : at + len(filling) if rng.random() < 0.5 else end] = filling
    if rng.random() < 0.1:
        del changed[rng.randrange(len(changed) + 1) :]
    return bytes(changed)


def readers(folder: Path) -> dict[str, tuple[list[bytes], Reader]]:
    """Returns, for each format, contents that are whole, and what reads them."""
    import torch

    import fastckpt
    from fastckpt.directories import dcp_metadata
    from fastckpt.engine import codec
    from fastckpt.formats import plain_pickle, strict_json
    from fastckpt.lazy import torch_names, value_digests
    from fastckpt.storage.file_system import Storage
    from tests.kit.paths import ROOT
    from tests.kit.readers import READERS, VALUES, find

    data = ROOT / "tests" / "data"
    corpus = data / "corpus"

    def seeds(*patterns: str) -> list[bytes]:
        return [path.read_bytes() for pattern in patterns for path in sorted(data.glob(pattern))]

    def as_file(name: str, content: bytes) -> object:
        path = folder / name
        path.write_bytes(content)
        tensors = fastckpt.open(path)
        return [tensors[each][...] for each in tensors]

    def in_step(step: Path, name: str, content: bytes) -> object:
        whole = (step / name).read_bytes()
        (step / name).write_bytes(content)
        try:
            return as_directory(step)
        finally:
            (step / name).write_bytes(whole)

    def as_directory(step: Path) -> object:
        tensors = fastckpt.open(step)
        return [tensors[each][...] for each in tensors]

    def as_metadata(content: bytes) -> object:
        (folder / ".metadata").write_bytes(content)
        return dcp_metadata.read(Storage(), str(folder / ".metadata"), True)

    def as_objects(content: bytes) -> object:
        torch_names.names_of(content, is_of_step=False)  # which has to accept it before
        return value_digests.digests_of(content, is_of_step=False)

    def as_planes(content: bytes) -> object:
        return codec.decode(content, memoryview(bytearray(8 << 10)))

    found: dict[str, tuple[list[bytes], Reader]] = {
        "torch file": (seeds("*.pt", "corpus/*.pt"), partial(as_file, "a.pt")),
        "safetensors": (seeds("corpus/*.safetensors"), partial(as_file, "a.safetensors")),
        "pickle": (
            [pickle.dumps(value, p) for value in VALUES[:6] for p in (2, 4, 5)],
            lambda content: plain_pickle.loads(content, find),
        ),
        "names of tensors": (
            seeds("corpus/*.pickle"),
            lambda content: torch_names.names_of(content, is_of_step=False),
        ),
        "digests of objects": (seeds("corpus/*.pickle"), as_objects),
        "digest of a file": (seeds("*.pt", "corpus/*.pt"), value_digests.digest_of_file),
        "JSON": (seeds("step/*/*.json"), strict_json.decode),
        "metadata of DCP": (seeds("corpus/*.metadata"), as_metadata),
        "planes": (seeds("corpus/*.planes"), as_planes),
    }
    headers = [each[8:4096].split(b"\n")[0].rstrip() for each in seeds("*/*/*.safetensors")]
    texts = seeds("step/*/*.json")
    texts += [text.rpartition(b"\n]")[0] for text in texts if b"\n]" in text] + headers
    for name, (sign, read) in READERS.items():
        whole = texts
        found[name] = (whole, lambda content, sign=sign, read=read: read(sign(content)))
        found[f"{name}, unsigned"] = (whole, read)
    for step in sorted((data / "step").iterdir()):
        copied = folder / step.name
        copied.mkdir()
        for path in step.iterdir():
            (copied / path.name).write_bytes(path.read_bytes())
        for path in step.iterdir():
            reader = partial(in_step, copied, path.name)
            found[f"{step.name}/{path.name}"] = ([path.read_bytes()], reader)
    torch.set_num_threads(1)
    assert corpus.is_dir() and all(contents for contents, _ in found.values())
    return found


def run(count: int, seed: int, folder: Path) -> Counter[str]:
    """Gives so many mutants to the readers in turn; returns how often each kind of end came."""
    from fastckpt.errors import CheckpointError
    from fastckpt.formats import plain_pickle

    allowed = (CheckpointError, pickle.UnpicklingError, *plain_pickle.DAMAGE, EOFError)
    formats = readers(folder)
    ends: Counter[str] = Counter()
    for name, (contents, read) in formats.items():
        for content in contents:
            try:
                read(content)
            except allowed as error:  # a text that is of another format
                ends[f"{name}: seed: {type(error).__name__}"] += 1
    largest = max(len(content) for contents, _ in formats.values() for content in contents)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + TIMES_MAX * largest + ROOM
    for number in range(count):
        if number % 100 == 0:
            print(f"mutant {number}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        rng = random.Random(f"{seed} {number}")
        name = [*formats][number % len(formats)]
        contents, read = formats[name]
        content = whole = rng.choice(contents)
        while content == whole:
            content = mutated(whole, rng)
        try:
            read(content)
            end = "read"
        except allowed as error:
            end = type(error).__name__
        ends[f"{name}: {end}"] += 1
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        assert peak <= most, f"mutant {number} ({name}) took the process to {peak} bytes"
    faulthandler.cancel_dump_traceback_later()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{count} mutants of {len(formats)} readers: at most {peak} bytes of {most}")
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    options = parser.parse_args()
    print(f"seed {options.seed}, process {os.getpid()}", flush=True)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        ends: Any = run(options.count, options.seed, Path(folder))
    for end, times in sorted(ends.items()):
        print(f"{times:8d} {end}")


if __name__ == "__main__":
    main()
