"""Scale without machines: what a save and a restore of 10,240 ranks cost beside moving the bytes.

    python benchmarks/scale.py            # all 10,240 ranks that save, some of those that restore
    python benchmarks/scale.py --data 4   # a smaller job, to see that it runs

Planning, layout, indexes, records and the manifest are the library's own, for tensors of the true
sizes that have no memory; only the CRCs are invented. What a rank holds stands in rank_gpt.py. It
must not know how the library does any of it.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import harness
from harness import Line, Row, at_most, holds, middle, progress, told
from rank_gpt import HIDDEN, LAYERS, VOCABULARY, Job, parameter_count

from fastckpt.formats import safetensors
from fastckpt.formats.manifest import MANIFEST, Manifest, ObjectsFile, Writer
from fastckpt.formats.shard_index import Piece, index_name, shard_name
from fastckpt.plan.boxes import Box, copies, covers
from fastckpt.plan.image import BLOCK_BYTES, block_count
from fastckpt.ranks.same_state import Description
from fastckpt.saving.pipeline import Pipeline
from fastckpt.steps.copies import StepCopies
from fastckpt.steps.load import StepReader
from fastckpt.steps.plan import Shard
from fastckpt.steps.posix import PosixSteps
from fastckpt.steps.store import Draft

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
        tensors, metadata: bytes of tensors, and of shards' headers and indexes, over all ranks.
        nbytes, plan_s: of each rank's shard, and the seconds that planning it took.
    """

    def __init__(self, job: Job, directory: Path, nonce: str) -> None:
        self.writers: list[bytes] = []
        self.boxes: dict[str, tuple[tuple[int, ...], list[Box]]] = {}
        self.tensors = self.metadata = 0
        self.nbytes: list[int] = []
        self.plan_s: list[float] = []
        for rank in range(job.ranks):
            self._add(job, rank, directory, nonce)
            if (rank + 1) % 1024 == 0:
                progress(f"planned {rank + 1} of {job.ranks} ranks")

    def _add(self, job: Job, rank: int, directory: Path, nonce: str) -> None:
        leaves = job.leaves(rank)
        started = time.perf_counter()
        shard = Shard(leaves, b"", rank)
        self.plan_s.append(time.perf_counter() - started)
        nbytes = shard.image.body_nbytes
        crcs = [*range(block_count(nbytes, BLOCK_BYTES))]
        index = shard.index(nonce, shard_name(rank, None), crcs)
        content = index.to_bytes()
        (directory / index_name(rank)).write_bytes(content)
        self.writers.append(Writer.of(index, index_name(rank), content).to_bytes())
        self.nbytes.append(nbytes)
        tensors = sum(map(stored_bytes, index.pieces))
        self.tensors += tensors
        self.metadata += nbytes - tensors + len(content)
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


def published(steps: PosixSteps, begun: Draft, job: Job, saved: Saved, nonce: str) -> int:
    """Commit the step as the first rank does; returns the bytes of its manifest."""
    manifest = Manifest(
        step=0,
        nonce=nonce,
        sequence=1,
        world_size=job.ranks,
        created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        objects=ObjectsFile("objects.pt", 4096, 0),
        writers=tuple(map(Writer.from_bytes, saved.writers)),
    )
    begun.commit(manifest, durable=True)
    begun.close()
    return Path(steps.path(begun.name, MANIFEST)).stat().st_size


def restored(pipeline: Pipeline, steps: PosixSteps, name: str, job: Job, rank: int) -> Row:
    """Plan the restore of one rank: which indexes it reads, and what it copies from where."""
    leaves = job.leaves(rank)
    places = [(leaf.key, leaf.local.dtype, leaf.shape, leaf.box) for leaf in leaves]
    wanted: dict[str, list[Box]] = {}
    for leaf in leaves:
        wanted.setdefault(leaf.key, []).append(leaf.box)
    manifest = steps.read(name)
    whole = StepCopies(pipeline.storage, pipeline.staging, [steps.path(name)])
    reader = StepReader(pipeline.staging, steps.path(name), manifest, whole)
    reader.find(places)  # raises unless every element is stored exactly once
    indexes = [writer for writer in manifest.writers if writer.rank in reader._indexes]
    writers, copied = set(), 0
    for index in reader._needed(places):
        for piece in index.pieces:
            itemsize = safetensors.DTYPES[piece.dtype].itemsize
            for box in wanted.get(piece.key, ()):
                for row in copies(piece.box, piece.begin, box, 0, itemsize):
                    writers.add(index.rank)
                    copied += row[2] * row[3]
    return {
        "rank": rank,
        "indexes": len(indexes),
        "indexes_used": len(writers),
        "metadata_bytes": sum(writer.index_nbytes for writer in indexes),
        "needed_bytes": sum(leaf.box.numel * leaf.local.element_size() for leaf in leaves),
        "copied_bytes": copied,
    }


def saving(saved: Saved, job: Job, again: list[float], manifest: int) -> list[Line]:
    """Hold what planning all ranks gave against its bars."""
    metadata, mean = saved.metadata + manifest, statistics.fmean(saved.nbytes)
    each = job.tensor * job.data  # ranks of a pipeline stage
    stages = [saved.nbytes[begin : begin + each] for begin in range(0, job.ranks, each)]
    within = max(max(stage) / statistics.fmean(stage) for stage in stages)
    unchanged = f"unchanged plan, made again (no cache): the slowest of {len(again)} ranks"
    handled = max(map(len, saved.writers)) + DIGEST_BYTES
    return [
        told("checkpoint", f"{saved.tensors / 1e12:.3f} TB in {job.ranks:,} shards"),
        holds("every element is stored exactly once (all ranks)", saved.is_partition()),
        at_most("first plan of a rank: the slowest of all", max(saved.plan_s), 1.0, ".4f", " s"),
        at_most(unchanged, max(again) * 1e3, 5.0, ".2f", " ms"),
        told("metadata of all ranks and the manifest", f"{metadata / 1e6:.1f} MB"),
        told("of which the manifest", f"{manifest / 1e6:.2f} MB"),
        at_most("metadata of all bytes", metadata / saved.tensors * 100, 0.1, ".4f", "%"),
        at_most("bytes of a rank, max of mean", max(saved.nbytes) / mean, 1.05, ".4f"),
        told("the same within a pipeline stage: the worst", f"{within:.4f}"),
        at_most("bytes rank 0 handles for a rank: most", handled, 1000, ".0f", " B"),
    ]


def restoring(rows: list[Row], job: Job, ranks: int) -> list[Line]:
    """Hold what planning some restores gave against its bars."""
    exact = all(row["needed_bytes"] == row["copied_bytes"] for row in rows)
    metadata = f"{middle(rows, 'metadata_bytes') / 1e6:.1f} MB"
    return [
        holds(f"{len(rows)} of {job.ranks:,} ranks: each element copied once", exact),
        told("indexes a rank reads", f"{middle(rows, 'indexes'):.0f} of {ranks:,}, {metadata}"),
        told("of which it uses", f"{middle(rows, 'indexes_used'):.0f}"),
    ]


def main() -> int:
    """Run what the command line asks for; returns 1 when a bar was missed."""
    options = arguments()
    job, other = Job(8, 16, options.data), Job(4, 8, 2 * options.data)
    pipeline, nonce = Pipeline(budget_bytes=STAGING_BYTES), secrets.token_hex(16)
    with harness.place("scale", options.dir) as directory:
        environment = harness.environment(directory)
        steps = PosixSteps(pipeline.storage, str(directory / "run"))
        begun = steps.begin(0)
        saved = Saved(job, directory / "run" / begun.name, nonce)
        again = planned_again(job, job.sample(options.sample))
        lines = saving(saved, job, again, published(steps, begun, job, saved, nonce))
        del saved
        rows = []
        for rank in other.sample(options.targets):
            rows.append(restored(pipeline, steps, begun.name, other, rank))
            progress(f"restore of rank {rank} planned")
        pipeline.close()
    model = (
        f"A GPT of {parameter_count():,} parameters ({LAYERS} layers, hidden {HIDDEN}, "
        f"vocabulary {VOCABULARY}, not tied), {job} = {job.ranks:,} ranks, distributed optimizer."
    )
    sections = {"Saving": lines, f"Restoring on {other}": restoring(rows, other, job.ranks)}
    record = {"environment": environment, "notes": [model], "results": {"restore": rows}}
    record["lines"] = harness.recorded(sections)
    return harness.concluded(record, options.out, "scale")


if __name__ == "__main__":
    sys.exit(main())
