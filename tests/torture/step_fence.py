"""Tries to have a step-fence save commit what no moment's state was: a large operation in place
begins right after save() returned, and what was committed is looked at.

    python -m tests.torture.step_fence [--trials 100] [--mib 16 256] [--ways save ...] [--busy]

Prints, for each way of saving, operation and size, how many trials were committed as they should
be, refused with StagingConflict, committed torn (old and new values mixed), and committed with the
new values alone. The last two have to be zero.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fastckpt

OLD = 0.5
WAIT_S = 120.0


class Cell(torch.nn.Module):
    """A model of one weight, or of several that have so many bytes together."""

    def __init__(self, nbytes: int, value: float, pieces: int = 4) -> None:
        super().__init__()
        count = nbytes // 4 // pieces
        weights = [torch.full((count,), value) for _ in range(pieces)]
        self.weights = torch.nn.ParameterList(weights)


class Trial:
    """A state, and an operation that changes all of it in place.

    Args:
        operation: one of OPERATIONS.
        nbytes: of the state.
    """

    def __init__(self, operation: str, nbytes: int) -> None:
        self.average: AveragedModel | None = None
        self.model = Cell(nbytes, OLD, 4 if operation in ("ema", "load_state_dict") else 1)
        if operation == "ema":
            self.other = Cell(nbytes, 2.0)
            self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            self.average.n_averaged.fill_(1)
            self.model = self.average.module
        elif operation in ("copy_", "load_state_dict"):
            self.other = Cell(nbytes, 2.0, len(self.model.weights))
        self._operation = operation

    def state(self) -> dict[str, torch.Tensor]:
        return {f"w{i}": weight.detach() for i, weight in enumerate(self.model.weights)}

    def reset(self) -> None:
        with torch.no_grad():
            for weight in self.model.weights:
                weight.fill_(OLD)

    def change(self) -> None:
        """The operation."""
        with torch.no_grad():
            OPERATIONS[self._operation](self)


OPERATIONS: dict[str, Callable[[Trial], object]] = {
    "ema": lambda its: its.average.update_parameters(its.other),
    "add_": lambda its: its.model.weights[0].add_(1),
    "exp_": lambda its: its.model.weights[0].exp_(),
    "copy_": lambda its: its.model.weights[0].copy_(its.other.weights[0]),
    "load_state_dict": lambda its: its.model.load_state_dict(its.other.state_dict()),
    "erfinv_": lambda its: its.model.weights[0].erfinv_(),
}


def saved_file(state: dict[str, torch.Tensor], root: Path) -> fastckpt.SaveHandle:
    return fastckpt.save(
        state, root / "a.pt", options=fastckpt.SaveOptions(fence="step", durable=False)
    )


def loaded_file(root: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(root / "a.pt", mmap=True)
    return loaded


def saved_step(state: dict[str, torch.Tensor], root: Path) -> fastckpt.SaveHandle:
    checkpointer = fastckpt.Checkpointer(
        root, options=fastckpt.SaveOptions(fence="step", durable=False), keep_last=1
    )
    return checkpointer.save(1, state)


def loaded_step(root: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (shard,) = root.glob("*/*.safetensors")
    return load_file(shard)


def saved_dcp(state: dict[str, torch.Tensor], root: Path) -> fastckpt.SaveHandle:
    from fastckpt.integrations import dcp

    writer = dcp.Writer(root, options=fastckpt.SaveOptions(durable=False))
    handle = dcp.async_save(
        state, storage_writer=writer, options=fastckpt.SaveOptions(fence="step"), no_dist=True
    )
    assert isinstance(handle, fastckpt.SaveHandle)
    return handle


def loaded_dcp(root: Path) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as stock

    from fastckpt.integrations import dcp

    state = {name: torch.empty(size) for name, size in _sizes(root).items()}
    stock.load(state, storage_reader=dcp.Reader(root), no_dist=True)
    return state


def _sizes(root: Path) -> dict[str, torch.Size]:
    from fastckpt.integrations import dcp

    metadata = dcp.Reader(root).read_metadata()
    return {name: entry.size for name, entry in metadata.state_dict_metadata.items()}


WAYS = {
    "save": (saved_file, loaded_file),
    "Checkpointer": (saved_step, loaded_step),
    "dcp.async_save": (saved_dcp, loaded_dcp),
}


def outcome_of(trial: Trial, way: str, root: Path) -> str:
    """What came of one save that an operation follows at once."""
    save, load = WAYS[way]
    trial.reset()
    handle = save(trial.state(), root)
    trial.change()
    error = handle.exception(WAIT_S)
    if isinstance(error, fastckpt.StagingConflict):
        return "refused"
    if error is not None:
        raise error
    bounds = [tensor.detach().aminmax() for tensor in load(root).values()]
    if all(float(low) == float(high) == OLD for low, high in bounds):
        return "old"
    news = all(float(low) == float(high) != OLD for low, high in bounds)
    return "new" if news else "torn"


def tried(way: str, operation: str, nbytes: int, trials: int, directory: str) -> Counter[str]:
    """How often each outcome came of so many trials."""
    found: Counter[str] = Counter()
    trial = Trial(operation, nbytes)
    for _ in range(trials):
        with tempfile.TemporaryDirectory(dir=directory) as root:
            found[outcome_of(trial, way, Path(root))] += 1
    return found


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Others compute meanwhile; they end with this process, however it ends."""
    compute = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    started = [subprocess.Popen([sys.executable, "-c", compute]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside")
    parser.add_argument("--dir", default="/dev/shm", help="where checkpoints go")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    directory = tempfile.mkdtemp(dir=options.dir)
    with busy(options.busy):
        for way in options.ways:
            for mib in options.mib:
                for operation in options.operations:
                    found = tried(way, operation, mib << 20, options.trials, directory)
                    total += found
                    counts = ", ".join(f"{name} {found[name]}" for name in KINDS)
                    print(f"{way:15} {mib:4} MiB {operation:16} {counts}", flush=True)
    shutil.rmtree(directory)
    print("all:", ", ".join(f"{name} {total[name]}" for name in KINDS))
    return 1 if total["torn"] or total["new"] else 0


KINDS = ("old", "refused", "torn", "new")

if __name__ == "__main__":
    raise SystemExit(main())
