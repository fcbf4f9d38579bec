"""DLIO's Llama checkpoints, which MLPerf Storage has, cut down: by fastckpt and by its torch.save.

    make bench-dlio DLIO=CHECKOUT BENCH_ARGS="--dir DIRECTORY_ON_A_REAL_DISK"

CHECKOUT is a git checkout of argonne-lcf/dlio_benchmark. Each case is one run of DLIO under mpiexec
in which both take turns (dlio/turns.py); what they need besides is installed on the first call.
torch.save is charged with an fsync of each file, and a case takes as long as its slowest rank. Must
not know how either saves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import harness
from ceiling import Ceiling
from harness import Line, Row, by_round, goal, holds, middle, progress, table
from rivals.environment import interpreter

OWN, OURS, LIMIT = "torch.save", "fastckpt", "fio"
RUN_S = 600
HERE = Path(__file__).resolve().parent


class Case(NamedTuple):
    """A workload of DLIO on some ranks; the shape is relative to the hidden size as in its own."""

    name: str
    workload: str
    ranks: int
    layers: int
    vocabulary: float
    feed_forward: float
    kv_heads: float  # a head has 128 numbers
    pipeline: int

    def overrides(self, hidden: int) -> list[str]:
        """Return what hydra is told."""
        heads = hidden // 128
        model = {
            "num_layers": self.layers,
            "parallelism.tensor": 1,
            "parallelism.pipeline": self.pipeline,
            "transformer.hidden_size": hidden,
            "transformer.vocab_size": int(self.vocabulary * hidden),
            "transformer.ffn_hidden_size": int(self.feed_forward * hidden),
            "transformer.num_attention_heads": heads,
            "transformer.num_kv_heads": max(1, int(self.kv_heads * heads)),
        }
        return [f"++workload.model.{key}={value}" for key, value in model.items()]


def cases(ranks: list[int]) -> list[Case]:
    """Return the 8B with ZeRO-3, two files of each rank, and the 405B, with a file of each layer of
    a pipeline's first replica.
    """
    found = [Case(f"8B, {n} ranks", "llama_8b_zero3", n, 2, 31.3, 3.5, 0.25, 1) for n in ranks]
    piped = [n for n in ranks if n % 2 == 0][-1:]
    return found + [
        Case(f"405B, {n} ranks", "llama_405b", n, 8, 7.83, 3.25, 0.125, 2) for n in piped
    ]


def run(case: Case, given: Any, python: Path, place: Path) -> list[Row]:
    """Return what each rank has found in one run of DLIO."""
    of = {
        "checkpoint_folder": place / "checkpoints",
        "time_between_checkpoints": 0,
        "num_checkpoints_write": 2 * (given.rounds + 1),  # one to warm up
        "num_checkpoints_read": 2 * (given.rounds + 1),
        "checkpoint_mechanism_classname": "dlio.turns.Turns",
    }
    command = [python.parent / "mpiexec", "-n", str(case.ranks), python, "-m"]
    command += ["dlio_benchmark.main", f"workload={case.workload}"]
    command += [f"++workload.checkpoint.{key}={value}" for key, value in of.items()]
    command += [f"++workload.output.folder={place}", f"hydra.run.dir={place}"]
    modules = [given.dlio.resolve(), HERE, harness.ROOT]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, modules)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, command), *case.overrides(given.hidden)],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    files = [place / f"turns-{rank}.json" for rank in range(case.ranks)]
    if done.returncode or not all(file.exists() for file in files):
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise SystemExit(f"DLIO ended with status {done.returncode} in {case.name}:\n{tail}")
    return [json.loads(file.read_text()) for file in files]


def slowest(ranks: list[Row]) -> list[Row]:
    """Return a row for each turn but the first of each way, with the clocks of the slowest rank."""
    clocks = ("seconds", "blocked_s")
    return [
        turn[0] | {key: max(row[key] for row in turn) for key in clocks if key in turn[0]}
        for turn in zip(*(rank["rows"] for rank in ranks), strict=True)
        if turn[0]["round"]
    ]


def limits(rows: list[Row], place: Path, nbytes: int) -> list[Row]:
    """Return rows of what the disk can do with as many bytes, measured once for all rounds."""
    rates = Ceiling(place, nbytes, quick=True).measure(reading=True)
    return [
        {"what": what, "way": LIMIT, "round": number, "seconds": nbytes / rates[what]}
        for what in ("write", "read")
        for number in sorted({row["round"] for row in rows})
    ]


def lines_of(ranks: list[Row], rows: list[Row]) -> list[Line]:
    """Return the verdicts of a case."""

    def of(what: str, way: str, key: str = "seconds") -> harness.Rounds:
        return by_round([r for r in rows if (r["what"], r["way"]) == (what, way)], key)

    def held(what: str, act: str) -> Line:
        return goal(what, of(act, OURS), (LIMIT, of(act, LIMIT)), (OWN, of(act, OWN)))

    return [
        held("written and synced", "write"),
        held("read, cold", "read"),
        goal("training waits", of("write", OURS, "blocked_s"), rival=(OWN, of("write", OWN))),
        holds(
            "all bytes came back, by torch.load and by fastckpt.load",
            not any(rank["wrong"] for rank in ranks),
        ),
    ]


def seconds_of(rows: list[Row], nbytes: int) -> str:
    """Return the medians as a table."""
    lines = []
    for what in ("write", "read"):
        for way in (OWN, OURS, LIMIT):
            its = [row for row in rows if (row["what"], row["way"]) == (what, way)]
            times = [row["seconds"] for row in its]
            shown = f"{middle(its, 'seconds'):.2f} s ({min(times):.2f} to {max(times):.2f})"
            rate = f"{nbytes / 2**30 / middle(its, 'seconds'):.2f} GiB/s"
            waits = f"{middle(its, 'blocked_s'):.2f} s" if "blocked_s" in its[0] else "-"
            lines.append([f"{what}, {way}", shown, rate, waits])
    return table(["", "durable, or read", "rate", "training waits"], lines)


def main() -> int:
    """Run what the command line asks for; returns 1 when a bar was missed."""
    parser = harness.options_of("Benchmark of DLIO's Llama checkpoints; see the top of this file.")
    parser.add_argument("--dlio", type=Path, required=True, help="a checkout of dlio_benchmark")
    parser.add_argument("--ranks", default="1,2,4", help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=1024, help="size of the models (%(default)s)")
    given = parser.parse_args()
    if not (given.dlio / "dlio_benchmark" / "main.py").is_file():
        parser.error(f"{given.dlio} is no checkout of argonne-lcf/dlio_benchmark")
    python = interpreter(HERE / "dlio" / "mechanisms.py")
    record: Row = {"environment": harness.environment(given.dir), "lines": {}, "tables": {}}
    record["results"], record["failures"] = {}, []
    told_lines = {}
    for case in cases([int(word) for word in harness.words(given.ranks)]):
        with harness.place("dlio", given.dir) as place:
            ranks = run(case, given, python, place)
            rows, nbytes = slowest(ranks), sum(rank["nbytes"] for rank in ranks)
            rows += limits(rows, place, nbytes)
        files = sum(rank["files"] for rank in ranks)
        title = f"{case.name}: {nbytes / 2**30:.2f} GiB in {files} files"
        told_lines[title] = lines_of(ranks, rows)
        record["tables"][title] = [seconds_of(rows, nbytes)]
        record["results"][title] = ranks
        record["failures"] += [f"{title}: {rank['wrong']}" for rank in ranks if rank["wrong"]]
        progress(f"{title}: {'; '.join(line.measured for line in told_lines[title])}")
    record["lines"] = harness.recorded(told_lines)
    return harness.concluded(record, given.out, "dlio")


if __name__ == "__main__":
    sys.exit(main())
