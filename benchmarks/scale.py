"""Scale without machines: what a save and a restore of 10,240 ranks cost beside moving the bytes.

    python benchmarks/scale.py            # all 10,240 ranks that save, some of those that restore
    python benchmarks/scale.py --data 4   # a smaller job, to see that it runs

Planning, layout, indexes, records and the manifest are the library's own, for tensors of the true
sizes that have no memory; only the CRCs are invented. What a rank holds stands in rank_gpt.py. It
must not know how the library does any of it.
"""

from __future__ import annotations

import argparse
import gc
import secrets
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import harness
from harness import Line, Row, at_most, holds, progress, told
from rank_gpt import HIDDEN, LAYERS, VOCABULARY, Job, parameter_count

from fastckpt.formats import safetensors
from fastckpt.formats.manifest import MANIFEST, Manifest, ObjectsFile, Writer
from fastckpt.formats.shard_index import Piece, index_name, shard_name
from fastckpt.plan.boxes import Box, copies, covers
from fastckpt.plan.image import BLOCK_BYTES, block_count
from fastckpt.ranks.same_state import Description
from fastckpt.saving.pipeline import Pipeline
from fastckpt.state.targets import Place
from fastckpt.steps.copies import StepCopies
from fastckpt.steps.load import StepReader
from fastckpt.steps.root import Steps
from fastckpt.steps.shard import Shard

AGAIN = 5  # times that an unchanged plan is made
DIGEST_BYTES = len(Description([]).digest())
STAGING_BYTES = 64 << 20


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = harness.options_of("Measure planning for thousands of ranks.")
    for flag, default, told_of in (
        ("--data", 80, "data-parallel ranks that save"),
        ("--sample", 64, "ranks whose plan is made again"),
        ("--targets", 16, "ranks whose restore is planned"),
    ):
        parser.add_argument(flag, type=harness.positive, default=default, help=told_of)
    return parser.parse_args()


class Saved:
    """What came of planning every rank of the saving job.

    Attributes:
        writers: their records, as the first rank gets them.
        boxes: stored parts of each tensor, over all ranks.
        sums: bytes of tensors, of shards' headers and of indexes, over all ranks.
        nbytes: of each rank's shard.
        plan_s, index_s: seconds each rank took.
    """

    def __init__(self, job: Job, directory: Path, nonce: str) -> None:
        self.writers: list[bytes] = []
        self.boxes: dict[str, tuple[tuple[int, ...], list[Box]]] = {}
        self.sums = {"tensors": 0, "headers": 0, "indexes": 0}
        self.nbytes: list[int] = []
        self.pieces: list[int] = []
        self.plan_s: list[float] = []
        self.index_s: list[float] = []
        for rank in range(job.ranks):
            self._add(job, rank, directory, nonce)
            if (rank + 1) % 1024 == 0:
                progress(f"planned {rank + 1} of {job.ranks} ranks")

    def _add(self, job: Job, rank: int, directory: Path, nonce: str) -> None:
        leaves = job.leaves(rank)
        started = time.perf_counter()
        shard = Shard(leaves, b"", rank)
        planned = time.perf_counter()
        nbytes = shard.image.body_nbytes
        crcs = [*range(block_count(nbytes, BLOCK_BYTES))]
        index = shard.index(nonce, shard_name(rank, None), crcs)
        content = index.to_bytes()
        record = Writer.of(index, index_name(rank), content).to_bytes()
        self.index_s.append(time.perf_counter() - planned)
        self.plan_s.append(planned - started)
        (directory / index_name(rank)).write_bytes(content)
        self.writers.append(record)
        self.nbytes.append(nbytes)
        self.pieces.append(len(index.pieces))
        tensors = sum(map(stored_bytes, index.pieces))
        self.sums["tensors"] += tensors
        self.sums["headers"] += nbytes - tensors
        self.sums["indexes"] += len(content)
        for piece in index.pieces:
            self.boxes.setdefault(piece.key, (piece.shape, []))[1].append(piece.box)

    def is_partition(self) -> bool:
        """Say whether all ranks together store every element of every tensor exactly once."""
        return all(
            covers(Box((0,) * len(shape), shape), boxes) for shape, boxes in self.boxes.values()
        )


def stored_bytes(piece: Piece) -> int:
    """Return the bytes of a piece in its file."""
    return piece.box.numel * safetensors.DTYPES[piece.dtype].itemsize


def planned_again(job: Job, sample: Sequence[int]) -> list[float]:
    """Return the median seconds each rank of the sample takes to plan the same state once more."""
    medians = []
    for rank in sample:
        leaves = job.leaves(rank)
        seconds = []
        for _ in range(AGAIN):
            started = time.perf_counter()
            Shard(leaves, b"", rank)
            seconds.append(time.perf_counter() - started)
        medians.append(statistics.median(seconds))
    return medians


def published(steps: Steps, name: str, begun: Any, job: Job, saved: Saved, nonce: str) -> Row:
    """Commit the step as the first rank does; returns the seconds and bytes of its manifest."""
    started = time.perf_counter()
    writers = tuple(map(Writer.from_bytes, saved.writers))
    parsed = time.perf_counter()
    manifest = Manifest(
        step=0,
        nonce=nonce,
        sequence=1,
        world_size=job.ranks,
        created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        objects=ObjectsFile("objects.pt", 4096, 0),
        writers=writers,
    )
    steps.publish(begun, manifest, durable=True)
    steps.storage.close(begun.manifest_fd)
    committed = time.perf_counter()
    steps.read(name)
    return {
        "nbytes": Path(steps.path(name, MANIFEST)).stat().st_size,
        "records_s": parsed - started,
        "publish_s": committed - parsed,
        "read_s": time.perf_counter() - committed,
    }


def rows_of(reader: StepReader, places: list[Place]) -> Iterator[tuple[int, int]]:
    """Yield the writer and the bytes of every copy that a restore of these places makes."""
    wanted: dict[str, list[Box]] = {}
    for key, _dtype, _shape, box in places:
        wanted.setdefault(key, []).append(box)
    for index in reader._needed(places):
        for piece in index.pieces:
            itemsize = safetensors.DTYPES[piece.dtype].itemsize
            for box in wanted.get(piece.key, ()):
                for row in copies(piece.box, piece.begin, box, 0, itemsize):
                    yield index.rank, row[2] * row[3]


def restored(pipeline: Pipeline, steps: Steps, name: str, job: Job, rank: int) -> Row:
    """Plan the restore of one rank: which indexes it reads, and what it copies from where."""
    leaves = job.leaves(rank)
    places = [(leaf.key, leaf.local.dtype, leaf.shape, leaf.box) for leaf in leaves]
    needed = sum(leaf.box.numel * leaf.local.element_size() for leaf in leaves)
    gc.collect()
    started = time.perf_counter()
    manifest = steps.read(name)
    read = time.perf_counter()
    whole = StepCopies(pipeline.storage, pipeline.staging, [steps.path(name)])
    reader = StepReader(pipeline.staging, steps.path(name), manifest, whole)
    reader.find(places)  # raises unless every element is stored exactly once
    found = time.perf_counter()
    indexes = [writer for writer in manifest.writers if writer.rank in reader._indexes]
    writers, rows, copied = set(), 0, 0
    for writer, nbytes in rows_of(reader, places):
        writers.add(writer)
        rows += 1
        copied += nbytes
    return {
        "rank": rank,
        "manifest_s": read - started,
        "find_s": found - read,
        "copies_s": time.perf_counter() - found,
        "indexes": len(indexes),
        "indexes_used": len(writers),
        "metadata_bytes": sum(writer.index_nbytes for writer in indexes),
        "needed_bytes": needed,
        "copied_bytes": copied,
        "rows": rows,
    }


def measure(options: argparse.Namespace, directory: Path) -> Row:
    """Save and restore without bytes; returns all that was measured."""
    job, other = Job(8, 16, options.data), Job(4, 8, 2 * options.data)
    pipeline = Pipeline(budget_bytes=STAGING_BYTES)
    steps, nonce = Steps(pipeline.storage, str(directory / "run")), secrets.token_hex(16)
    begun = steps.begin(0)
    saved = Saved(job, directory / "run" / begun.name, nonce)
    again = planned_again(job, job.sample(options.sample))
    progress(f"planned again: {len(again)} ranks")
    partition = saved.is_partition()
    progress(f"every element of {len(saved.boxes)} tensors is stored once: {partition}")
    manifest = published(steps, begun.name, begun, job, saved, nonce)
    progress(f"manifest of {manifest['nbytes']} bytes published")
    result: Row = {
        "parameters": parameter_count(),
        "ranks": job.ranks,
        "job": str(job),
        "target_job": str(other),
        "target_ranks": other.ranks,
        "sums": saved.sums,
        "shard_bytes": spread(saved.nbytes),
        "stage_imbalance": stage_imbalance(job, saved.nbytes),
        "pieces": spread(saved.pieces),
        "record_bytes": spread(list(map(len, saved.writers))),
        "plan_s": spread(saved.plan_s),
        "plan_again_s": {**spread(again), "ranks": len(again)},
        "index_s": spread(saved.index_s),
        "partition": partition,
        "manifest": manifest,
    }
    del saved
    targets = other.sample(options.targets)
    result["restore"] = []
    for rank in targets:
        result["restore"].append(restored(pipeline, steps, begun.name, other, rank))
        progress(f"restore of rank {rank} planned")
    pipeline.close()
    return result


def spread(values: Sequence[float]) -> Row:
    """Return what is told of many values."""
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "max": max(values),
    }


def stage_imbalance(job: Job, nbytes: Sequence[int]) -> float:
    """Return the worst ratio of the most bytes of a rank to the mean of its pipeline stage."""
    each = job.tensor * job.data
    stages = [nbytes[begin : begin + each] for begin in range(0, job.ranks, each)]
    return max(max(stage) / statistics.fmean(stage) for stage in stages)


def save_lines(result: Row) -> Iterator[Line]:
    """Yield the lines of the table that are about saving."""
    ranks, sums, manifest = result["ranks"], result["sums"], result["manifest"]
    shards, within = result["shard_bytes"], result["stage_imbalance"]
    metadata = sums["headers"] + sums["indexes"] + manifest["nbytes"]
    yield told("checkpoint", f"{sums['tensors'] / 1e12:.3f} TB in {ranks:,} shards")
    yield holds("every element is stored exactly once (all ranks)", result["partition"])
    first, again = result["plan_s"], result["plan_again_s"]
    yield at_most("first plan of a rank: the slowest of all", first["max"], 1.0, ".4f", " s")
    yield told("first plan of a rank: median of all", f"{first['median'] * 1e3:.2f} ms")
    yield at_most(
        f"unchanged plan, made again (no cache): the slowest of {again['ranks']} ranks",
        again["max"] * 1e3,
        5.0,
        ".2f",
        " ms",
    )
    yield told("unchanged plan: median", f"{again['median'] * 1e3:.2f} ms")
    index = result["index_s"]
    yield told(
        "index and record of a rank: median, slowest",
        f"{index['median'] * 1e3:.2f} ms, {index['max'] * 1e3:.2f} ms",
    )
    yield told(
        "pieces of a rank: median, most",
        f"{result['pieces']['median']:.0f}, {result['pieces']['max']}",
    )
    mean = ", ".join(f"{sums[key] / ranks / 1e3:.1f} kB" for key in ("indexes", "headers"))
    yield told("index and header of a rank: mean", mean)
    yield told("metadata of all ranks and the manifest", f"{metadata / 1e6:.1f} MB")
    yield at_most("metadata of all bytes", metadata / sums["tensors"] * 100, 0.1, ".4f", "%")
    yield told("bytes of a rank: mean", f"{shards['mean'] / 1e6:.2f} MB")
    yield at_most("bytes of a rank, max of mean", shards["max"] / shards["mean"], 1.05, ".4f")
    yield told("the same within a pipeline stage: the worst", f"{within:.4f}")
    handled = result["record_bytes"]["max"] + DIGEST_BYTES
    yield at_most("bytes rank 0 handles for a rank: most", handled, 1000, ".0f", " B")
    yield told("manifest", f"{manifest['nbytes'] / 1e6:.2f} MB")
    yield told(
        "all records parsed; manifest made, written, synced; read, parsed, validated",
        f"{manifest['records_s']:.2f} s; {manifest['publish_s']:.2f} s; {manifest['read_s']:.2f} s",
    )


def restore_lines(result: Row) -> Iterator[Line]:
    """Yield the lines about restoring on another parallelism."""
    rows = result["restore"]

    def both(key: str, form: str, scale: float = 1.0) -> str:
        values = [row[key] / scale for row in rows]
        return f"{statistics.median(values):{form}}, {max(values):{form}}"

    exact = all(row["needed_bytes"] == row["copied_bytes"] for row in rows)
    yield holds(f"{len(rows)} of {result['target_ranks']:,} ranks: each element copied once", exact)
    yield told("bytes a rank needs: median, most", both("needed_bytes", ".0f", 1e6) + " MB")
    yield told("indexes it reads", both("indexes", ".0f") + f" of {result['ranks']:,}")
    yield told("of which it uses", both("indexes_used", ".0f"))
    yield told("bytes of indexes it reads", both("metadata_bytes", ".1f", 1e6) + " MB")
    yield told("reading the manifest", both("manifest_s", ".2f") + " s")
    yield told("reading indexes, choosing and checking", both("find_s", ".2f") + " s")
    yield told("copies: rows of one rank", both("rows", ".0f"))
    yield told("making them", both("copies_s", ".2f") + " s")


def main() -> int:
    """Run what the command line asks for; returns 1 when a bar was missed."""
    options = arguments()
    with harness.place("scale", options.dir) as directory:
        environment = harness.environment(directory)
        result = measure(options, directory)
    model = (
        f"A GPT of {result['parameters']:,} parameters ({LAYERS} layers, hidden {HIDDEN}, "
        f"vocabulary {VOCABULARY}, not tied), {result['job']} = {result['ranks']:,} ranks, "
        "distributed optimizer."
    )
    sections = {"Saving": [*save_lines(result)]}
    sections[f"Restoring on {result['target_job']}"] = [*restore_lines(result)]
    record = {"environment": environment, "notes": [model], "results": result}
    record["lines"] = harness.recorded(sections)
    return harness.concluded(record, options.out, "scale")


if __name__ == "__main__":
    sys.exit(main())
