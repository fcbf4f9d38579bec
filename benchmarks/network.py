"""The benchmark of network file systems: saves and loads in turns with torch.save and fsync, and
with cp and dd, on each that tests/shared/run.sh can mount here, or in a directory of one's own.

    make bench-network BENCH_ARGS="--systems sshfs,nfs --rounds 5"
    make bench-network BENCH_ARGS="--dir /mnt/lustre/me"

Client and server are this machine, so the numbers tell what the client's way costs, not a network.
It must not know how anything is saved; network_turns.py does that where the file system is mounted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import harness
from harness import Line, Row, at_least, number, progress, spread_of, told
from network_turns import ROW

# Of each file system: Debian's packages that it consists of.
SYSTEMS = {
    "sshfs": ("sshfs", "openssh-server"),
    "gluster": ("glusterfs-server",),
    "moosefs": ("moosefs-master",),
    "nfs": ("nfs-kernel-server", "qemu-system-x86"),
    "9p": ("diod", "qemu-system-x86"),
    "lustre": ("qemu-system-x86",),
}
IN_VM = ("nfs", "9p", "lustre")  # whose clients are modules of a virtual machine's kernel
ABSENT = {
    "gpfs, beegfs, wekafs, ceph, cifs": "no server of these is at hand; measure with --dir",
}
TRIAL = Path(__file__).with_name("network_turns.py")
RUN = harness.ROOT / "tests" / "shared" / "run.sh"
# cp looks for holes, which Lustre's targets in memory never answer.
WAYS = {"lustre": ["--ways", "fastckpt,torch.save,dd,dd direct"]}
BASE, SHELL = "torch.save", ("cp", "dd", "dd direct")
LIMIT_S = 1800


def version(kind: str, rows: list[Row]) -> str:
    """Return the versions of a file system's packages, and of the kernel if it is not this one."""
    if kind not in SYSTEMS:
        return ""
    command = ["dpkg-query", "-W", *SYSTEMS[kind]]
    done = subprocess.run(command, capture_output=True, text=True)
    kernels = [f"Linux {row['kernel']}" for row in rows if kind in IN_VM and "kernel" in row]
    return ", ".join([*(" ".join(line.split()) for line in done.stdout.splitlines()), *kernels])


def measured(command: list[str], environment: dict[str, str]) -> list[Row]:
    """The rows that a command tells.

    Raises:
        RuntimeError: it failed, with the last that it said.
    """
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    rows, said = list[Row](), ""
    with subprocess.Popen(
        command, env=os.environ | environment, text=True, errors="replace", **pipes
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if ROW + "{" in line:  # a virtual machine's console may say something before
                rows.append(json.loads(line.partition(ROW)[2]))
                row = rows[-1]
                if "s" in row:
                    progress(f"{row['op']} of {row['mib']} MiB by {row['way']}: {row['s']:.3f} s")
            elif line.strip() and not line.startswith("["):  # which the kernel says
                said = line.strip()
    if process.returncode:
        raise RuntimeError(said)
    return rows


def ratios(rows: list[Row], way: str) -> list[Row]:
    """Another way's time to ours, in each round that both have: above 1 where we are faster."""
    ours, its = (
        {row["round"]: row["s"] for row in rows if row["way"] == name and "s" in row}
        for name in ("fastckpt", way)
    )
    return [{"x": its[each] / ours[each]} for each in ours.keys() & its.keys()]


def best_of_shell(rows: list[Row]) -> str | None:
    """The way of cp and dd with the lowest median."""
    times = {
        way: statistics.median(row["s"] for row in rows if row["way"] == way and "s" in row)
        for way in SHELL
        if any(row["way"] == way and "s" in row for row in rows)
    }
    return min(times, key=lambda way: times[way]) if times else None


def lines_of(rows: list[Row]) -> list[Line]:
    """The ratios, against the bars."""
    lines = []
    for mib in dict.fromkeys(row["mib"] for row in rows if "mib" in row):
        for op in ("save", "load"):
            its = [row for row in rows if row["op"] == op and row["mib"] == mib]
            best = best_of_shell(its)
            for way, bar in ((BASE, 1.0), *([(best, 0.9)] if best else [])):
                values, what = ratios(its, way), f"{op} of {mib} MiB, x of {way}"
                lines.append(
                    at_least(what, [each["x"] for each in values], bar, ".2f", " x")
                    if values
                    else told(what, "not measured")
                )
    wrong = [row for row in rows if row.get("same") is False]
    return [*lines, harness.holds("every state came back as it was", not wrong)]


def table_of(rows: list[Row]) -> str:
    """The medians of every way."""
    cases = dict.fromkeys((row["op"], row["mib"]) for row in rows if "mib" in row)
    cells = []
    for way in dict.fromkeys(row["way"] for row in rows if "way" in row):
        its = [row for row in rows if row.get("way") == way and "s" in row]
        medians = (
            harness.median_of([row for row in its if (row["op"], row["mib"]) == case], "s")
            for case in cases
        )
        cells.append([way, *(number(value, suffix=" s") for value in medians)])
    return harness.table(["way", *(f"{op}, {mib} MiB" for op, mib in cases)], cells)


def summary(results: dict[str, list[Row]]) -> str:
    """The table in the documents: every ratio of every file system, small states last."""
    rows = []
    for kind, told_rows in results.items():
        for mib in dict.fromkeys(row["mib"] for row in told_rows if "mib" in row):
            cells = [f"{kind}, {mib} MiB", version(kind, told_rows)]
            for op in ("save", "load"):
                its = [row for row in told_rows if row["op"] == op and row["mib"] == mib]
                best = best_of_shell(its)
                cells.append(spread_of(ratios(its, BASE), "x", ".2f"))
                against = spread_of(ratios(its, best), "x", ".2f") if best else "-"
                cells.append(f"{best}: {against}" if best else against)
            rows.append(cells)
    heads = ("file system", "version", "save x torch.save", "x best of cp, dd")
    return harness.table([*heads, "load x torch.save", "x best of cp, dd"], rows)


def main() -> int:
    """Run what the command line asks for; returns 1 when a bar was missed."""
    parser = harness.options_of("Benchmark saves and loads on network file systems.")
    parser.set_defaults(dir=None)
    parser.add_argument("--mib", default="256,64", help="of the states")
    harness.choice(parser, "--systems", list(SYSTEMS))
    given = parser.parse_args()
    arguments = ["--mib", given.mib, "--rounds", str(given.rounds)]
    commands = {kind: [str(RUN), kind, *arguments, *WAYS.get(kind, [])] for kind in given.systems}
    if given.dir is not None:
        where = str(given.dir)
        commands = {where: [sys.executable, str(TRIAL), where, where, *arguments]}
    sections, tables, results, missing = {}, {}, {}, dict(ABSENT)
    environment = harness.environment(given.dir or Path())
    for kind, command in commands.items():
        progress(kind)
        try:
            rows = measured(command, {"TRIAL": str(TRIAL), "PYTHON": sys.executable})
        except (OSError, RuntimeError) as error:
            missing[kind] = str(error)
            continue
        results[kind] = rows
        sections[kind] = lines_of(rows)
        tables[kind] = [table_of(rows)]
    sections["summary"], tables["summary"] = [], [summary(results)]
    record = {
        "environment": environment,
        "titles": {
            kind: f"{kind} ({version(kind, results[kind])})" for kind in results if kind in SYSTEMS
        },
        "lines": harness.recorded(sections),
        "tables": tables,
        "results": results,
        "missing": missing,
    }
    return harness.concluded(record, given.out, "network")


if __name__ == "__main__":
    sys.exit(main())
