"""The benchmark of object stores: a save to a server of this machine, against obstore alone with
the same bytes, DCP with s3torchconnector, and a save to a directory.

    make bench-objects BENCH_ARGS="--gib 1 --rounds 5"

One server reads and drops what is uploaded, so that the clients are measured; SeaweedFS, which is
as slow for everybody, gets a quarter of the bytes, and loads are measured there. Each round has a
new server, and in it each way a process of its own, whose last save is measured. It must not know
how anything is saved.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
from harness import Line, Row, at_most, by_round, goal, middle, progress, spread_of
from rivals.dcp_s3torchconnector import DcpToS3
from rivals.object_stores import FastckptSteps, Obstore, one_turn
from rivals.peer import Peer
from rivals.process import in_process_of, reason_of

from fastckpt.cli.bench.benchmark import rotated

SERVERS = {"drain": 1.0, "seaweedfs": 0.25}  # with the share of the bytes that each gets
DROPS = "drain"  # which has nothing to load
OURS, LOCAL = "fastckpt", "fastckpt, directory"
BUCKET = "bucket"


@contextmanager
def server(kind: str, directory: Path) -> Iterator[dict[str, Any]]:
    """A server with a bucket; gives the options of its clients."""
    from tests.kit.objects import weed

    if kind == "seaweedfs":
        with weed.Weed(directory, volumes_max=32, volume_mib=1024) as serving:
            yield weed.options(serving.port)
        return
    command = [sys.executable, "-m", "tests.kit.objects.lax"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=harness.ROOT, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        yield weed.options(int(process.stdout.readline()))
        process.stdin.close()


def measured(kind: str, given: Any, directory: Path) -> tuple[list[Row], Row]:
    """Rows of all rounds, in which the ways take turns; and why a way could not be measured."""
    rows, missing = list[Row](), Row()
    nbytes = int(given.gib * SERVERS[kind] * 2**30)
    for each in range(given.rounds):
        with harness.place("server", directory) as data, server(kind, data) as options:
            peers: list[Peer] = [
                FastckptSteps(OURS, options, f"s3://{BUCKET}/steps"),
                Obstore(BUCKET, options, "bare"),
                DcpToS3(options, f"s3://{BUCKET}/dcp"),
                FastckptSteps(LOCAL, None, ""),
            ]
            for peer in rotated(peers, each):
                with harness.place("turn", directory) as here:
                    try:
                        row = in_process_of(peer, one_turn, nbytes, here, kind != DROPS)
                    except Exception as error:  # a library's result
                        missing[peer.name] = reason_of(error)
                        progress(f"{peer.name} FAILED: {missing[peer.name]}")
                        continue
                rows.append({"way": peer.name, "round": each, **row})
                clocks = ", ".join(f"{key} {value:.3f}" for key, value in row.items())
                progress(f"{kind}, {peer.name}: {clocks}")
    return rows, missing


def ratios(rows: list[Row], other: str, key: str) -> list[float]:
    """Those of ours to another way, of the same rounds."""
    ours, its = ({r["round"]: r[key] for r in rows if r["way"] == way} for way in (OURS, other))
    return [ours[each] / its[each] for each in sorted(ours.keys() & its.keys())]


def lines_of(rows: list[Row], gib: float) -> list[Line]:
    """Medians, against the bars."""
    ours = [row for row in rows if row["way"] == OURS]
    cpu = [row["cpu_s"] / gib for row in ours]
    lines = [at_most("CPU seconds of a GiB, staging included", cpu, 0.8, ".2f", " s")]
    clocks = {"committed": "committed_s"} | ({"load": "load_s"} if "load_s" in ours[0] else {})
    for what, key in clocks.items():
        # What the server and its link can do is what the client alone does with the bytes.
        mine, bare, dcp = (
            by_round([row for row in rows if row["way"] == way], key)
            for way in (OURS, Obstore.name, DcpToS3.name)
        )
        lines.append(goal(what, mine, (Obstore.name, bare), (DcpToS3.name, dcp)))
    stalls = ratios(rows, LOCAL, "stall_s")
    note = f" ({middle(ours, 'stall_s'):.3f} s)"
    lines.append(at_most("stall, of a save to a directory", stalls, 1.05, ".2f", " x", note))
    return lines


def table_of(rows: list[Row]) -> str:
    """The medians of every way."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    heads = {"stall_s": "stall", "committed_s": "committed", "cpu_s": "CPU"}
    heads |= {"load_s": "load", "load_cpu_s": "load's CPU"}
    keys = [key for key in heads if key in rows[0]]
    cells = []
    for way in ways:
        its = [row for row in rows if row["way"] == way]
        cells.append([way, *(spread_of(its, key) for key in keys)])
    return harness.table(["way", *(f"{heads[key]} s" for key in keys)], cells)


def main() -> int:
    """Run what the command line asks for; returns 1 when a bar was missed."""
    parser = harness.options_of("Benchmark saves to an object store of this machine.")
    parser.add_argument("--gib", type=float, default=1.0, help="of the state")
    harness.choice(parser, "--servers", [*SERVERS])
    given = parser.parse_args()
    environment = harness.environment(given.dir)
    sections, tables, results, missing = {}, {}, {}, {}
    for kind in given.servers:
        with harness.place("objects", given.dir) as directory:
            results[kind], missing[kind] = measured(kind, given, directory)
        sections[kind] = lines_of(results[kind], given.gib * SERVERS[kind])
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
