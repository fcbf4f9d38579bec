"""The benchmark of healing: a new replica group of torchft gets the state of a healthy one.

    python benchmarks/healing.py --gib 1 --rounds 3

Source and new group are two processes that share the cores and talk over loopback, by fastckpt's
transport and by torchft's own; each pair heals twice, and the second time counts. The state is of
CPU tensors. *Healed* is from the begin of the send until the new group has the state, of which all
bytes are compared. *Blocked* is what the source's step takes longer: the send, and at the end of
the step, which takes a second, the call that ends it. It must not know how a transport sends.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
import torch.distributed as dist
from ceiling import LIMIT, socket_s
from harness import Line, Row, holds, middle, progress, spread_of
from rank_bench import against
from rivals import torchft_transport
from rivals.environment import interpreter
from rivals.process import in_process
from rivals.torchft_transport import OURS, WAYS, one_side

from fastckpt.cli.bench.benchmark import rotated

CLOCKS = {"healed_s": "healed", "blocked_s": "the source's step is blocked"}


def healed(python: Path, way: str, nbytes: int) -> Row:
    """Run both sides; returns the clocks, and the names of tensors that came as others."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(2) as pool:
        sides = [
            pool.submit(in_process, python, one_side, way, rank, nbytes, store.port)
            for rank in range(2)
        ]
        source, group = (side.result() for side in sides)
    clocks = {"healed_s": group["end"] - source["begun"], "blocked_s": source["blocked_s"]}
    return {**clocks, "wrong": group["wrong"]}


def lines_of(rows: list[Row]) -> list[Line]:
    """Hold our transport against the limit of the link and the best of the others."""
    lines = []
    for key, what in CLOCKS.items():
        its = {way: [row for row in rows if row["name"] == way] for way in WAYS if way != OURS}
        best = min(its, key=lambda way: middle(its[way], key))
        lines.append(against(rows, what, OURS, best, key, "socket_s" if key == "healed_s" else ""))
    right = not any(row.get("wrong") for row in rows)
    return [*lines, holds("every state came as it was sent", right)]


def table_of(rows: list[Row]) -> str:
    """Return the medians of every way."""
    cells = []
    for way in WAYS:
        its = [row for row in rows if row["name"] == way]
        cells.append([way, *(spread_of(its, key) for key in CLOCKS)])
    limit = spread_of([row for row in rows if row["name"] == LIMIT], "socket_s")
    return harness.table(["seconds", *CLOCKS.values()], [*cells, ["*limit:* a socket", limit, "-"]])


def main() -> int:
    """Run what the command line asks for; returns 1 when a bar was missed."""
    parser = harness.options_of("Benchmark how replica groups are healed.", rounds=3)
    parser.add_argument("--gib", type=float, default=1.0, help="of the state")
    given = parser.parse_args()
    environment: Any = harness.environment(given.dir)
    python, nbytes, rows = interpreter(Path(torchft_transport.__file__)), int(given.gib * 2**30), []
    for number in range(given.rounds):
        rows.append({"name": LIMIT, "round": number, "socket_s": socket_s(nbytes)})
        for way in rotated(WAYS, number):
            rows.append({"name": way, "round": number, **healed(python, way, nbytes)})
            clocks = (f"{key} {rows[-1][key]:.3f}" for key in CLOCKS)
            progress(f"round {number + 1}, {way}: {', '.join(clocks)}")
    title = f"A replica group gets {given.gib:g} GiB"
    record = {"environment": environment, "results": rows, "tables": {title: [table_of(rows)]}}
    record["lines"] = harness.recorded({title: lines_of(rows)})
    return harness.concluded(record, given.out, "healing")


if __name__ == "__main__":
    sys.exit(main())
