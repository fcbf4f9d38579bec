"""One rank of a job that rank_crew.py started: holds a state, saves and restores it, tells times.

Times are seconds since all ranks were at the same barrier. It must not know what the times are held
against.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Row
from rank_bench import MATRIX, sharded_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fastckpt
from fastckpt.cli.bench.benchmark import before_clock
from fastckpt.cli.bench.saves import gpt_state

WAIT_S = 600
PART_BYTES = 16 << 20


class Rank:
    """What one rank keeps between calls; every public method can be called."""

    def __init__(self, port: int, rank: int, size: int) -> None:
        timeout = timedelta(seconds=WAIT_S)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        self._rank, self._size = rank, size
        self._mesh: DeviceMesh = init_device_mesh("cpu", (size,))
        self._alone = [dist.new_group([each]) for each in range(size)][rank]
        self._state: Any = None
        self._nbytes = 0  # of the state, on this rank
        self._checkpointers: dict[str, fastckpt.Checkpointer] = {}
        self._handle: fastckpt.SaveHandle | None = None

    def ready(self) -> None:
        """Answer, for all is set up."""

    def memory_part(self, part: str, **arguments: Any) -> Any:
        """Do one part of the benchmark of memory."""
        import memory_parts

        return getattr(memory_parts, part)(**arguments)

    def hold_gpt(self, nbytes: int) -> None:
        """Hold a training state of a GPT, the same on every rank."""
        self._state, self._nbytes = gpt_state(nbytes), nbytes // self._size

    def hold_part(self, nbytes: int) -> None:
        """Hold so many bytes of tensors that are as many times as large as there are ranks."""
        self._nbytes = nbytes
        generator = torch.Generator().manual_seed(self._rank)
        count = max(1, nbytes // PART_BYTES)
        rows = max(1, nbytes // count // 4 // MATRIX)
        self._state = {
            f"part.{number}": DTensor.from_local(
                torch.randn(rows, MATRIX, generator=generator), self._mesh, [Shard(0)]
            )
            for number in range(count)
        }

    def hold_fsdp(self, nbytes: int, filled: bool) -> int:
        """Hold a model of fp32 matrices under FSDP2; returns the bytes of this rank's part."""
        model = sharded_model(nbytes, self._mesh)
        self._state = {"model": model}
        held = 0
        for local, expected in self._matrices():
            local.copy_(expected) if filled else local.zero_()
            held += local.nbytes
        self._nbytes = held
        return held

    def _matrices(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this rank's part of every matrix of the model, and what it is to hold."""
        for number, parameter in enumerate(self._state["model"].parameters()):
            generator = torch.Generator().manual_seed(number)
            whole = torch.empty(MATRIX, MATRIX).uniform_(generator=generator)
            yield (
                parameter.detach().to_local(),
                whole.chunk(self._size)[self._rank],
            )

    def is_restored(self) -> bool:
        """Say whether the model holds what it was filled with, and erase it."""
        right = True
        for local, expected in self._matrices():
            right = right and torch.equal(local, expected)
            local.zero_()
        return right

    def save_file(self, path: str, fence: str, alone: bool = False, in_turn: bool = False) -> Row:
        """Save the state to one file, together, or each rank to one of its own."""
        group = None if alone else dist.group.WORLD
        path = f"{path}.{self._rank}" if alone else path
        started = self._begin(in_turn)
        handle = fastckpt.save(
            self._state, path, options=fastckpt.SaveOptions(fence=fence), group=group
        )
        return self._timed(handle, started, in_turn)

    def torch_save(self, path: str) -> Row:
        """Save by the first rank's torch.save and fsync, for which all wait."""
        started = self._begin()
        if self._rank == 0:
            with open(path, "wb") as file:
                torch.save(self._state, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()
        return {"committed_s": time.perf_counter() - started}

    def torch_save_part(self, path: str) -> Row:
        """Save this rank's part by torch.save, and wait for the disk, as training does today."""
        started = self._begin()
        own = f"{path}.{self._rank}"
        with open(own, "wb") as file:
            torch.save({name: part.to_local() for name, part in self._state.items()}, file)
            file.flush()
            os.fsync(file.fileno())
        took = time.perf_counter() - started
        os.unlink(own)
        return {"stall_s": took, "root_s": took}

    def open_steps(
        self, name: str, root: str, fence: str = "call", alone: bool = False, **arguments: Any
    ) -> None:
        """Make a Checkpointer, of all ranks or of each one alone."""
        group = self._alone if alone else None
        root = f"{root}-{self._rank}" if alone else root
        options = fastckpt.SaveOptions(fence=fence)
        self._checkpointers[name] = fastckpt.Checkpointer(
            root, group=group, options=options, **arguments
        )

    def save_step(self, name: str, step: int, in_turn: bool = False) -> Row:
        """Save a step."""
        started = self._begin(in_turn)
        handle = self._checkpointers[name].save(step, self._state)
        return self._timed(handle, started, in_turn)

    def finish(self) -> None:
        """Wait for the save that was begun in turn."""
        assert self._handle is not None
        self._handle.result()
        self._handle = None

    def restore(self, name: str) -> Row:
        """Restore the newest step into the state that is held."""
        before = disk_bytes_read()
        started = self._begin()
        step = self._checkpointers[name].restore(self._state)
        return {
            "restored_s": time.perf_counter() - started,
            "step": step,
            "bytes_read": disk_bytes_read() - before,
        }

    def close_steps(self, name: str) -> None:
        """Close a Checkpointer."""
        self._checkpointers.pop(name).close()

    def clear(self, directory: str) -> None:
        """Remove a directory of this rank's own file system."""
        dist.barrier()
        shutil.rmtree(directory, ignore_errors=True)

    def _begin(self, in_turn: bool = False) -> float:
        before_clock(self._nbytes if not in_turn else 0)
        if not in_turn:
            dist.barrier()
        return time.perf_counter()

    def _timed(self, handle: fastckpt.SaveHandle, started: float, in_turn: bool) -> Row:
        """Wait for a save that was just begun; seconds until the call returned, and to the end.

        In turn, the wait is only until the state was copied: other ranks have not begun.
        """
        returned = time.perf_counter()
        row: Row = {"returned_s": returned - started}
        if in_turn:
            handle.wait_staged()
            self._handle = handle
            return row
        stats = handle.result()
        row["committed_s"] = time.perf_counter() - started
        # With tiers result() may come at the first one.
        row |= {"stall_s": stats.stall_s, "root_s": stats.committed_s}
        return row | {"nbytes": stats.nbytes, "backend": stats.backend, "direct": stats.direct}


def disk_bytes_read() -> int:
    """Return the bytes that devices delivered for this process so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise KeyError("read_bytes")


def main(port: int, rank: int, size: int, pipe: int) -> None:
    """Answer calls until there is nobody to ask for more."""
    warnings.filterwarnings("ignore")
    member = Rank(port, rank, size)
    with Connection(pipe) as connection:
        while True:
            try:
                name, arguments = connection.recv()
            except EOFError:
                return
            try:
                answer = None, getattr(member, name)(**arguments)
            except Exception as error:  # told to whoever asked
                traceback.print_exc()
                answer = f"{type(error).__name__}: {error}".splitlines()[0], None
            connection.send(answer)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
