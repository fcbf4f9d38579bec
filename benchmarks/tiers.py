"""What a node-local tier costs and gives: one process saves to a slow root, straight and by way of
a local device that is several times as fast, both throttled.

    python benchmarks/tiers.py --size 512 --root-mb 100 --times 5 --rounds 5

Prints a table of stall, the commit in the local tier and the way to the root, each beside what the
devices allow. Needs root, cgroup v1. It must not know how a save is done.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # an installed fastckpt comes first

from rank_devices import reason_missing, throttled  # noqa: E402

MIB = 1 << 20
SETTLING_S = 0.5  # between saves: for what one still removes when its result is known
# Mounts two devices for one process alone, throttles both for it, and becomes it.
ENTER = """
mkdir -p "$3/root" "$3/local" && mount -t ext4 "$1" "$3/root" && mount -t ext4 "$2" "$3/local" &&
echo $$ > "$4/cgroup.procs" && place="$3" && shift 4 && exec "$@" "$place"
"""


def life(place: Path, size: int, rounds: int) -> list[dict[str, Any]]:
    """Saves in the process that has the devices; each save in turn with the tier and without."""
    import torch

    from fastckpt import Checkpointer

    torch.set_num_threads(1)
    state = {"w": torch.ones(size * MIB // 4)}
    ways = {
        "straight": Checkpointer(place / "root" / "straight", keep_last=1),
        "tiers": Checkpointer(
            place / "root" / "tiers", local=place / "local" / "steps", keep_local=1, keep_last=1
        ),
    }
    rows = []
    for number in range(rounds + 1):
        for way, checkpointer in ways.items():
            time.sleep(SETTLING_S)
            stats = checkpointer.save(number, state).result()
            if number:  # the first save pays for memory
                rows.append(
                    {
                        "way": way,
                        "stall_s": stats.stall_s,
                        "local_s": stats.local_committed_s,
                        "root_s": stats.committed_s,
                        "nbytes": stats.nbytes,
                    }
                )
    for checkpointer in ways.values():
        checkpointer.close()
    return rows


def measure(size: int, root_bps: int, local_bps: int, rounds: int, backing: Path) -> list[Any]:
    """The rows of life() on two devices of these rates."""
    room = 3 * size * MIB + 128 * MIB
    with (
        throttled(1, room, root_bps, backing) as slow,
        throttled(1, room, local_bps, backing) as fast,
    ):
        number = os.stat(fast.devices[0]).st_rdev
        rule = f"{os.major(number)}:{os.minor(number)} {local_bps}"
        (slow.cgroup / "blkio.throttle.write_bps_device").write_text(rule)
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh"]
        command += [slow.devices[0], fast.devices[0], str(slow.mountpoint), str(slow.cgroup)]
        command += [sys.executable, __file__, "--size", str(size), "--rounds", str(rounds)]
        done = subprocess.run([*command, "--life"], stdout=subprocess.PIPE, check=True, text=True)
    rows: list[Any] = json.loads(done.stdout)
    return rows


def table(rows: list[Any], root_bps: int, local_bps: int) -> str:
    """Medians, beside their bars."""

    def median(way: str, value: Any) -> float:
        return statistics.median(value(row) for row in rows if row["way"] == way)

    nbytes = rows[0]["nbytes"]
    straight = median("straight", lambda row: row["stall_s"])
    stall = median("tiers", lambda row: row["stall_s"])
    local = median("tiers", lambda row: row["local_s"])
    drain = median("tiers", lambda row: row["root_s"] - row["local_s"])
    alone = median("straight", lambda row: row["root_s"])
    lines = [
        ("stall", f"{1e3 * stall:.1f} ms", f"{1e3 * straight:.1f} ms without a tier"),
        (
            "committed locally",
            f"{local:.3f} s",
            f"{local * local_bps / nbytes:.3f} x bytes / local rate; bar 1.1",
        ),
        (
            "from there to the root",
            f"{drain:.3f} s",
            f"{nbytes / drain / root_bps:.3f} of the root's rate; bar 0.95",
        ),
        (
            "straight to the root",
            f"{alone:.3f} s",
            f"{nbytes / alone / root_bps:.3f} of the root's rate",
        ),
    ]
    head = "| what | median | beside |\n|---|---|---|\n"
    return head + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description="Benchmark a node-local tier.")
    parser.add_argument("--size", type=int, default=512, help="MiB of the state")
    parser.add_argument("--root-mb", type=int, default=100, help="10^6 bytes a second to the root")
    parser.add_argument("--times", type=float, default=5.0, help="how much faster local is")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each way that count")
    parser.add_argument(
        "--backing",
        type=Path,
        default=Path("/dev/shm"),
        help="directory for the files behind the devices",
    )
    parser.add_argument("--life", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.life is not None:
        json.dump(life(options.life, options.size, options.rounds), sys.stdout)
        return
    reason = reason_missing()
    if reason is not None:
        parser.error(reason)
    root_bps = options.root_mb * 10**6
    local_bps = int(root_bps * options.times)
    rows = measure(options.size, root_bps, local_bps, options.rounds, options.backing)
    print(table(rows, root_bps, local_bps))


if __name__ == "__main__":
    main()
