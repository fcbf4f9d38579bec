"""One rank of the burst benchmark: holds a part of a state and saves it in one of several ways.

Reads calls from stdin and answers on stdout, a JSON line each, for rank_crew.py. It must not know
what its times are held against.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # an installed fastckpt comes first

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

import fastckpt  # noqa: E402

COLUMNS = 1024


class Rank:
    """What one rank keeps between calls; every public method can be called."""

    def __init__(self, port: int, rank: int, size: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        timeout = timedelta(seconds=600)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        self._rank, self._size, self._state = rank, size, {}
        self._mesh = init_device_mesh("cpu", (size,))
        self._checkpointer: fastckpt.Checkpointer | None = None

    def ready(self) -> None:
        """Answer, for all is set up."""

    def hold(self, nbytes: int) -> None:
        """Hold so many bytes of a tensor of which each rank has as many."""
        part = torch.randn(nbytes // 4 // COLUMNS, COLUMNS)
        self._state = {"part": DTensor.from_local(part, self._mesh, [Shard(0)])}

    def open(self, root: str, options: dict[str, Any]) -> None:
        """Make a Checkpointer for the saves to come."""
        self._checkpointer = fastckpt.Checkpointer(root, keep_last=1, **options)

    def close(self) -> None:
        """Wait for all that is left to do."""
        assert self._checkpointer is not None
        self._checkpointer.close()

    def clear(self) -> None:
        """Remove the steps: the first rank, which would, does not see this rank's target."""
        assert self._checkpointer is not None
        dist.barrier()
        shutil.rmtree(self._checkpointer.root, ignore_errors=True)

    def save(self, step: int) -> dict[str, float | None]:
        """Save in the background; answer when it is committed."""
        assert self._checkpointer is not None
        dist.barrier()
        stats = self._checkpointer.save(step, self._state).result()
        # With tiers result() may come at the first one; the last word is close()'s.
        return {
            "stall_s": stats.stall_s,
            "committed_s": stats.committed_s,
            "paced_s": stats.paced_s,
        }

    def save_sync(self, path: str) -> dict[str, float | None]:
        """Save this rank's part by torch.save, and wait for the disk, as training does today."""
        dist.barrier()
        began = time.perf_counter()
        with open(f"{path}.{self._rank}", "wb") as file:
            torch.save(self._state["part"].to_local(), file)
            file.flush()
            os.fsync(file.fileno())
        took = time.perf_counter() - began
        os.unlink(f"{path}.{self._rank}")
        return {"stall_s": took, "committed_s": took, "paced_s": 0.0}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    rank = Rank(*map(int, sys.argv[1:4]))
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": getattr(rank, name)(**arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
