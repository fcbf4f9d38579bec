"""The measurements of several ranks, one function each: what is run, in which order, how often.

Each returns its rows as they were measured and the lines of the table made of them. It must not
know how ranks save, how they are started, or what becomes of the lines.
"""

from __future__ import annotations

import json
import mmap
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from ceiling import Cell, Fio
from rank_bars import Line, at_least, at_most, holds, told
from rank_crew import Crew, crew
from rank_devices import reason_missing, throttled
from saving import rotated
from state import byte_view
from storage import drop_page_cache, remove, size_of

from fastckpt.engine.codec import FrameWriter, encoder_of
from fastckpt.plan.image import BLOCK_BYTES, ItemRun
from fastckpt.storage.file_system import Storage

Row = dict[str, Any]
PAIR = 2
FOUR = 4
SCALING = (1, 2, 4)
SCALING_BPS = 200_000_000
CODEC_BPS = 200_000_000
PLAIN, CODECS = "plain", ("zstd", "planes")
CALL_ROUNDS = 20
CALL_WARM_UP = 3
FIO_SHARE_BYTES = 16 << 20  # jobs get multiples of the largest block
THROTTLED_BYTES_MIN = 64 << 20  # the kernel lets a tenth of a second's bytes through at once


@dataclass
class Surroundings:
    """Where and how much is measured.

    Attributes:
        nbytes: of the object that two ranks save; the other parts save fractions of it.
        rounds: how often.
        directory: on the file system to measure.
        backing: directory for the files behind throttled devices.
        progress: told what was just done.
    """

    nbytes: int
    rounds: int
    directory: Path
    backing: Path
    progress: Callable[[str], None]
    missing: dict[str, str] = field(default_factory=dict)

    @cached_property
    def fio(self) -> PairedFio | None:
        """What two jobs of fio can do here, scanned once; None without fio."""
        reason = Fio.reason_missing()
        if reason is not None:
            self.missing["fio"] = reason
            return None
        fio = PairedFio(self.directory, self.nbytes, self.progress)
        fio.scan()
        return fio


class PairedFio(Fio):
    """fio's best with as many jobs as there are ranks, each on a file of its own."""

    def __init__(self, directory: Path, nbytes: int, progress: Callable[[str], None]) -> None:
        super().__init__(directory, nbytes, progress)
        self.file = directory / "fio"

    def run(self, operation: str, nbytes: int, cell: Cell) -> float:
        """Run one cell; returns bytes a second of all jobs, the final fsyncs included."""
        share = max(FIO_SHARE_BYTES, nbytes // PAIR // FIO_SHARE_BYTES * FIO_SHARE_BYTES)
        command = [
            "fio",
            "--name=cell",
            f"--directory={self.file}",
            f"--numjobs={PAIR}",
            "--group_reporting",
            f"--size={share}",
            f"--rw={operation}",
            f"--bs={cell['block_mib']}m",
            f"--iodepth={cell['depth']}",
            f"--ioengine={cell['engine']}",
            f"--direct={int(cell['direct'])}",
            "--output-format=json",
        ]
        if operation == "write":
            shutil.rmtree(self.file, ignore_errors=True)
            command += ["--fallocate=native", "--end_fsync=1"]
        self.file.mkdir(exist_ok=True)
        if operation == "read" and not cell["direct"]:
            drop_page_cache(self.file)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        if result["error"] or not result[operation]["io_bytes"]:
            raise RuntimeError(f"fio {operation} failed with error {result['error']}")
        return float(result[operation]["io_bytes"] / (result[operation]["runtime"] / 1e3))


Part = Callable[[Surroundings], tuple[Row, list[Line]]]


def longest(rows: Iterable[Row], key: str) -> float:
    """Return the time of the slowest rank."""
    return max(float(row[key]) for row in rows)


def seconds(values: list[float]) -> str:
    """Return the median of times for a table."""
    return f"{statistics.median(values):.3f} s"


def one_file(here: Surroundings) -> tuple[Row, list[Line]]:
    """Two ranks that hold the same object save it to one file, against rank 0's torch.save."""
    path, rows = here.directory / "object.pt", []
    with crew(PAIR) as ranks:
        ranks("hold_gpt", nbytes=here.nbytes)
        ways = {
            "fastckpt": partial(ranks, "save_file", path=str(path), fence="call"),
            "torch": partial(ranks, "torch_save", path=str(path)),
        }
        for number in range(-1, here.rounds):  # the first one is to warm up
            row: Row = {"round": number}
            for name in rotated([*ways], number):
                answers = ways[name]()
                row[f"{name}_s"] = longest(answers, "committed_s")
                if name == "fastckpt":
                    row |= {key: answers[0][key] for key in ("backend", "direct")}
                    row["returned_s"] = longest(answers, "returned_s")
                row["nbytes"] = size_of(path)
                remove(path)
            if here.fio is not None:
                row["fio_bps"] = here.fio.measure(reading=False)["write"]
            here.progress(f"file {row}")
            rows.append(row)
    del rows[0]
    ratios = [row["fastckpt_s"] / row["torch_s"] for row in rows]
    lines = [
        told("saved object", f"{rows[0]['nbytes'] / 2**30:.2f} GiB"),
        told("save(group=), committed", seconds([row["fastckpt_s"] for row in rows])),
        told("the call, fence call", seconds([row["returned_s"] for row in rows])),
        told("rank 0 torch.save + fsync + barrier", seconds([row["torch_s"] for row in rows])),
        at_most("committed of torch.save", statistics.median(ratios), 0.45, ".3f", " x"),
    ]
    if here.fio is not None:
        shares = [row["nbytes"] / row["fastckpt_s"] / row["fio_bps"] for row in rows]
        lines.append(at_least("rate of fio, 2 jobs", statistics.median(shares), 0.9, ".2f", " x"))
    return {"rows": rows}, lines


def scaling(here: Surroundings) -> tuple[Row, list[Line]]:
    """Each rank has a device of its own and the same bytes: 1, 2 and 4 ranks."""
    nbytes, rows = max(THROTTLED_BYTES_MIN, here.nbytes // 8), []
    with ExitStack() as stack:
        room = nbytes * 3 // 2
        disks = stack.enter_context(throttled(max(SCALING), room, SCALING_BPS, here.backing))
        crews = {size: stack.enter_context(crew(size, disks.given)) for size in SCALING}
        for ranks in crews.values():
            ranks("hold_part", nbytes=nbytes)
            ranks("open_steps", name="steps", root=str(disks.mountpoint / "run"))
        for number in range(-1, here.rounds):  # the first one is to warm up
            row: Row = {"round": number}
            for size in rotated(SCALING, number):
                row[str(size)] = one_scaling(crews[size], number + 1, disks.mountpoint)
            here.progress(f"scaling {row}")
            rows.append(row)
        for ranks in crews.values():
            ranks("close_steps", name="steps")
    del rows[0]
    lines = [told("bytes of each rank", f"{nbytes / 2**20:.0f} MiB")]
    for size in SCALING:
        rates = [size * row[str(size)]["nbytes"] / row[str(size)]["committed_s"] for row in rows]
        shown = f"{statistics.median(rates) / 1e6:.0f} MB/s"
        lines.append(told(f"committed, {size} x {SCALING_BPS / 1e6:.0f} MB/s", shown))
        if size > 1:
            shares = [row["1"]["committed_s"] / row[str(size)]["committed_s"] for row in rows]
            share = statistics.median(shares)
            lines.append(at_least(f"{size} ranks, of linear", share, 0.9, ".3f", " x"))
    return {"nbytes": nbytes, "write_bps": SCALING_BPS, "rows": rows}, lines


def one_scaling(ranks: Crew, step: int, mountpoint: Path) -> Row:
    """Save one step by ranks that each have a device; they share devices, but not at a time."""
    answers = ranks("save_step", name="steps", step=step)
    ranks("clear", directory=str(mountpoint))
    return {
        "committed_s": longest(answers, "committed_s"),
        "nbytes": min(answer["nbytes"] for answer in answers),
        "direct": answers[0]["direct"],
    }


def balance(here: Surroundings) -> tuple[Row, list[Line]]:
    """How evenly four ranks divide a state that all of them hold."""
    root, path = here.directory / "balance", here.directory / "balance.pt"
    with crew(FOUR) as ranks:
        # In a smaller one, most tensors would be so small that they are the first rank's alone.
        ranks("hold_gpt", nbytes=here.nbytes // 4)
        ranks("open_steps", name="steps", root=str(root))
        ranks("save_step", name="steps", step=0)
        ranks("close_steps", name="steps")
        parts = [answer["nbytes"] for answer in ranks("save_file", path=str(path), fence="call")]
    assert sum(parts) == size_of(path)
    shards = [file.stat().st_size for file in sorted(root.glob("step-*/rank-*.safetensors"))]
    remove(path)
    remove(root)
    lines = [told("state, held by 4 ranks", f"{sum(shards) / 2**20:.0f} MiB in shards")]
    for what, sizes in (("Checkpointer, shards", shards), ("save(group=), parts", parts)):
        assert len(sizes) == FOUR
        uneven = max(sizes) / statistics.fmean(sizes)
        bar = 1.01
        if what.startswith("save"):  # cut at blocks: a part may have one more than another
            bar = max(bar, 1 + BLOCK_BYTES / statistics.fmean(sizes))
        lines.append(at_most(f"{what}: max of mean", uneven, bar, ".4f"))
    return {"shards": shards, "parts": parts}, lines


def call(here: Surroundings) -> tuple[Row, list[Line]]:
    """What coordination costs the training thread: the call under the step fence, by 4 ranks.

    Ranks call in turn, each when the one before has copied its state, as if each had its cores to
    itself; and once all at the same time, as it is here.
    """
    directory, path = here.directory / "call", here.directory / "call.pt"
    directory.mkdir()
    rows: list[Row] = []
    with crew(FOUR) as ranks:
        ranks("hold_gpt", nbytes=here.nbytes // 8)
        for name, alone in (("together", False), ("alone", True)):
            root = str(directory / name)
            ranks("open_steps", name=name, root=root, alone=alone, fence="step", keep_last=1)
        for number in range(-CALL_WARM_UP, max(here.rounds, CALL_ROUNDS)):
            rows.append(one_call(ranks, number + CALL_WARM_UP, path))
            here.progress(f"call, ms: {in_ms(rows[-1])}")
        for name in ("together", "alone"):
            ranks("close_steps", name=name)
    remove(directory)
    remove(path.with_name(f"{path.name}.0"))
    remove(path)
    del rows[:CALL_WARM_UP]
    lines = []
    for what, key in (("Checkpointer.save()", "step"), ("save(group=)", "file")):
        for way, name in (
            ("at_once", "4 ranks at the same time: the slowest"),
            ("together", "4 ranks in turn: rank 0"),
            ("alone", "rank 0 alone"),
        ):
            shown = f"{statistics.median(row[f'{key}_{way}'] for row in rows) * 1e3:.2f} ms"
            lines.append(told(f"{what}: {name}", shown))
        added = [row[f"{key}_together"] - row[f"{key}_alone"] for row in rows]
        more = statistics.median(added) * 1e3
        lines.append(
            at_most(f"{what}: rank 0, with the others less alone", more, 2.0, ".2f", " ms")
        )
    return {"rows": rows}, lines


def one_call(ranks: Crew, step: int, path: Path) -> Row:
    """Time the calls of one round; each save is over before the next one begins."""

    def in_turn(count: int, call: str, /, **arguments: Any) -> float:
        answers = []
        for rank in range(count):
            answers += ranks(call, ranks=range(rank, rank + 1), in_turn=True, **arguments)
        ranks("finish", ranks=range(count))
        return float(answers[0]["returned_s"])  # like with like: it is the one that pickles

    file: Row = {"path": str(path), "fence": "step"}
    ways: dict[str, Callable[[], float]] = {
        "step_together": partial(in_turn, FOUR, "save_step", name="together", step=2 * step),
        "step_alone": partial(in_turn, 1, "save_step", name="alone", step=step),
        "file_together": partial(in_turn, FOUR, "save_file", **file),
        "file_alone": partial(in_turn, 1, "save_file", alone=True, **file),
        "step_at_once": lambda: longest(
            ranks("save_step", name="together", step=2 * step + 1), "returned_s"
        ),
        "file_at_once": lambda: longest(ranks("save_file", **file), "returned_s"),
    }
    return {name: ways[name]() for name in rotated([*ways], step)}


def in_ms(row: Row) -> str:
    """Return a row of seconds in few characters."""
    return ", ".join(f"{key} {value * 1e3:.2f}" for key, value in row.items())


def restore(here: Surroundings) -> tuple[Row, list[Line]]:
    """Two ranks restore, cold, what four had saved under FSDP2."""
    root, rows = here.directory / "restore", []
    with crew(FOUR) as ranks:
        ranks("hold_fsdp", nbytes=here.nbytes, filled=True)
        ranks("open_steps", name="steps", root=str(root))
        ranks("save_step", name="steps", step=7)
        ranks("close_steps", name="steps")
    with crew(PAIR) as ranks:
        needed = sum(ranks("hold_fsdp", nbytes=here.nbytes, filled=False))
        ranks("open_steps", name="steps", root=str(root))
        for number in range(here.rounds):
            cold = drop_page_cache(root)
            answers = ranks("restore", name="steps")
            row: Row = {
                "round": number,
                "cold_by": cold,
                "restored_s": longest(answers, "restored_s"),
                "bytes_read": sum(answer["bytes_read"] for answer in answers),
                "right": all(ranks("is_restored")),
            }
            if here.fio is not None:
                best = here.fio.measure(reading=True)
                row["fio_bps"] = max(best["read_direct"], best["read_buffered"])
            here.progress(f"restore {row}")
            rows.append(row)
        ranks("close_steps", name="steps")
    remove(root)
    excess = statistics.median(row["bytes_read"] / needed for row in rows)
    rates = [needed / row["restored_s"] for row in rows]
    lines = [
        told("restored", f"{needed / 2**30:.2f} GiB on 2 ranks, saved by 4"),
        holds("every byte is right", all(row["right"] for row in rows)),
        told("cold restore", seconds([row["restored_s"] for row in rows])),
        told("rate", f"{statistics.median(rates) / 1e9:.2f} GB/s"),
    ]
    if any(row["bytes_read"] for row in rows):  # a file system in memory reads no device
        lines.append(at_most("bytes read from the device of needed", excess, 1.1, ".3f", " x"))
    if here.fio is not None:
        shares = [rate / row["fio_bps"] for rate, row in zip(rates, rows, strict=True)]
        lines.append(at_least("rate of fio, 2 jobs", statistics.median(shares), 0.8, ".2f", " x"))
    return {"needed": needed, "rows": rows}, lines


class Nowhere(Storage):
    """Writes nothing: what is left is compression."""

    def write_at(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        return


def codec(here: Surroundings) -> tuple[Row, list[Line]]:
    """bf16 weights with each codec and without one, on a device that is slow."""
    nbytes, rows, ways = max(THROTTLED_BYTES_MIN, here.nbytes // 4), [], (PLAIN, *CODECS)
    speeds = {name: [compressed_bps(name) for _ in range(here.rounds)] for name in CODECS}
    with (
        throttled(1, nbytes * 3 // 2, CODEC_BPS, here.backing) as disks,
        crew(1, disks.given) as ranks,
    ):
        ranks("hold_weights", nbytes=nbytes)
        for name in ways:
            root, codec = str(disks.mountpoint / name), None if name == PLAIN else name
            ranks("open_steps", name=name, root=root, codec=codec)
        for number in range(-1, here.rounds):
            row: Row = {"round": number}
            for name in rotated(ways, number):
                [answer] = ranks("save_step", name=name, step=number + 1)
                [row[f"{name}_bytes"]] = ranks("stored", directory=str(disks.mountpoint))
                row[f"{name}_s"] = answer["committed_s"]
                ranks("clear", directory=str(disks.mountpoint))
            here.progress(f"codec {row}")
            rows.append(row)
        for name in ways:
            ranks("close_steps", name=name)
    del rows[0]
    lines = [
        told("bf16 weights", f"{rows[0]['plain_bytes'] / 2**20:.0f} MiB"),
        told("committed, without", seconds([row["plain_s"] for row in rows])),
    ]
    for name in CODECS:
        ratios = [row[f"{name}_s"] / row["plain_s"] for row in rows]
        stored = rows[0][f"{name}_bytes"] / rows[0]["plain_bytes"]
        lines += [
            told(f"stored with {name}", f"{stored:.3f} x"),
            told(f"{name} on one core", f"{statistics.median(speeds[name]) / 1e9:.2f} GB/s"),
            told(f"committed, with {name}", seconds([row[f"{name}_s"] for row in rows])),
            told(f"with {name} of without: median", f"{statistics.median(ratios):.3f} x"),
            at_most(
                f"with {name} of without at {CODEC_BPS / 1e6:.0f} MB/s: worst",
                max(ratios),
                1.0,
                ".3f",
                " x",
            ),
        ]
    return {"nbytes": nbytes, "write_bps": CODEC_BPS, "speeds": speeds, "rows": rows}, lines


def compressed_bps(codec: str) -> float:
    """Return the bytes a second that one thread compresses of bf16 weights, once it is warm."""
    count = 5
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(count * BLOCK_BYTES // 2, generator=generator).mul_(0.02)
    content = memoryview(byte_view(weights.to(torch.bfloat16)).numpy())
    block = mmap.mmap(-1, BLOCK_BYTES)
    encoder = encoder_of(codec, [ItemRun(0, 2, True)], BLOCK_BYTES)
    writer = FrameWriter(Nowhere(), -1, "nowhere", len(content), BLOCK_BYTES, encoder)
    spent = []
    for begin in range(0, len(content), BLOCK_BYTES):
        block[:] = content[begin : begin + BLOCK_BYTES]
        started = time.perf_counter()
        writer.transfer("write", -1, memoryview(block), begin)
        spent.append(time.perf_counter() - started)
    return BLOCK_BYTES / statistics.median(spent)


PARTS: dict[str, tuple[str, Part]] = {
    "file": ("One object, one disk, 2 ranks", one_file),
    "scaling": ("A device for each rank", scaling),
    "balance": ("Balance of a replicated state, 4 ranks", balance),
    "call": ("The training thread, 4 ranks, fence step", call),
    "restore": ("Restore 2 <- 4 ranks, FSDP2, cold", restore),
    "codec": ("Codecs, bf16 weights, 1 rank", codec),
}
NEED_DISKS = ("scaling", "codec")


def run(names: list[str], here: Surroundings) -> tuple[Row, dict[str, list[Line]]]:
    """Run parts; returns for each its rows and its lines. What cannot run here says why."""
    results: Row = {}
    lines: dict[str, list[Line]] = {}
    for name in names:
        reason = reason_missing() if name in NEED_DISKS else None
        if reason is not None:
            here.missing[name] = reason
            continue
        title, part = PARTS[name]
        here.progress(title)
        results[name], lines[name] = part(here)
    return results, lines
