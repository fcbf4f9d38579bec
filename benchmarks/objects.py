"""The benchmark of object stores: a save to a server of this machine, against obstore alone with
the same bytes, DCP with s3torchconnector, and a save to a directory.

    make bench-objects BENCH_ARGS="--gib 1 --rounds 5"

The server is one that reads and drops what is uploaded, so that the clients are measured, or
SeaweedFS (--server seaweedfs), which is as slow for everybody. Each way has a process of its own,
which saves three times; the third is measured. It must not know how anything is saved.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
from harness import Line, Row, at_most, middle, number, progress, told
from rivals.dcp_s3torchconnector import DcpToS3
from rivals.object_stores import FastckptSteps, Obstore, one_turn
from rivals.peer import Peer
from rivals.process import in_process_of, reason_of

from fastckpt.cli.bench.benchmark import rotated

SERVERS = ("drain", "seaweedfs")
OURS, LOCAL = "fastckpt", "fastckpt, directory"
BUCKET = "bucket"


@contextmanager
def server(kind: str, directory: Path) -> Iterator[dict[str, Any]]:
    """A server with a bucket; gives the options of its clients."""
    from tests.objects import weed

    if kind == "seaweedfs":
        with weed.Weed(directory / "weed", volumes_max=32, volume_mib=1024) as serving:
            yield weed.options(serving.port)
        return
    command = [sys.executable, "-m", "tests.objects.lax"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=harness.ROOT, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        yield weed.options(int(process.stdout.readline()))
        process.stdin.close()


def measured(options: dict[str, Any], given: Any, directory: Path) -> tuple[list[Row], Row]:
    """Rows of all rounds, in which the ways take turns; and why a way could not be measured."""
    rows, missing = list[Row](), Row()
    for each in range(given.rounds):
        root = f"s3://{BUCKET}/{each}"
        peers: list[Peer] = [
            FastckptSteps(OURS, options, f"{root}/steps"),
            Obstore(BUCKET, options, f"{each}/bare"),
            DcpToS3(options, f"{root}/dcp"),
            FastckptSteps(LOCAL, None, ""),
        ]
        for peer in rotated(peers, each):
            with harness.place("turn", directory) as here:
                try:
                    row = in_process_of(peer, one_turn, int(given.gib * 2**30), here)
                except Exception as error:  # a library's result
                    missing[peer.name] = reason_of(error)
                    progress(f"{peer.name} FAILED: {missing[peer.name]}")
                    continue
            rows.append({"way": peer.name, "round": each, **row})
            clocks = ", ".join(f"{key} {value:.3f}" for key, value in row.items())
            progress(f"{peer.name}: {clocks}")
    return rows, missing


def ratio(rows: list[Row], other: str, key: str) -> float | None:
    """The median of ours to another way's, of the same rounds; None if that has no rows."""
    ours, its = ({r["round"]: r[key] for r in rows if r["way"] == way} for way in (OURS, other))
    both = ours.keys() & its.keys()
    return statistics.median(ours[each] / its[each] for each in both) if both else None


def lines_of(rows: list[Row], gib: float) -> list[Line]:
    """Medians, against the bars."""
    ours = [row for row in rows if row["way"] == OURS]
    cpu = middle(ours, "cpu_s") / gib
    lines = [at_most("CPU seconds of a GiB, staging included", cpu, 0.8, ".2f", " s")]
    against = (
        ("committed, of obstore alone", Obstore.name, "committed_s", 1.15),
        ("committed, of DCP with s3torchconnector", DcpToS3.name, "committed_s", 0.5),
        ("stall, of a save to a directory", LOCAL, "stall_s", 1.05),
    )
    for what, other, key, bar in against:
        value = ratio(rows, other, key)
        note = f" ({number(middle(ours, key))} s)"
        lines.append(
            told(what, "not measured")
            if value is None
            else at_most(what, value, bar, ".2f", " x", note)
        )
    return lines


def table_of(rows: list[Row]) -> str:
    """The medians of every way."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    keys = ("stall_s", "committed_s", "cpu_s")
    cells = []
    for way in ways:
        its = [row for row in rows if row["way"] == way]
        cells.append([way, *(number(middle(its, key), suffix=" s") for key in keys)])
    return harness.table(["way", "stall", "committed", "CPU"], cells)


def main() -> int:
    """Run what the command line asks for; returns 1 when a bar was missed."""
    parser = harness.options_of("Benchmark saves to an object store of this machine.")
    parser.add_argument("--gib", type=float, default=1.0, help="of the state")
    harness.choice(parser, "--servers", SERVERS)
    given = parser.parse_args()
    environment = harness.environment(given.dir)
    sections, tables, results, missing = {}, {}, {}, {}
    for kind in given.servers:
        with harness.place("objects", given.dir) as directory, server(kind, directory) as options:
            results[kind], missing[kind] = measured(options, given, directory)
        sections[kind] = lines_of(results[kind], given.gib)
        tables[kind] = [table_of(results[kind])]
    record = {
        "environment": environment,
        "lines": harness.recorded(sections),
        "tables": tables,
        "results": results,
        "missing": {
            f"{way}, {kind}": why for kind, ways in missing.items() for way, why in ways.items()
        },
    }
    return harness.concluded(record, given.out, "objects")


if __name__ == "__main__":
    sys.exit(main())
