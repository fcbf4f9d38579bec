"""`fastckpt bench save` and `load`: compares fastckpt with torch and safetensors. Each save ends
when its bytes are durable, each load when its tensors have arrived.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors.torch
import torch

import fastckpt
from fastckpt.arguments.names import listed
from fastckpt.arguments.quantities import shown_rate, shown_size, shown_time
from fastckpt.cli.bench.benchmark import Command, Result, in_turn, medians, shown_rounds, table
from fastckpt.cli.bench.machine import fsync_path, make_cold, make_warm, removed
from fastckpt.cli.progress import progress
from fastckpt.errors import CheckpointError, telling
from fastckpt.formats.torch_pickle import torch_load, torch_save

State = dict[str, Any]

_LAYERS, _VOCABULARY, _POSITIONS = 12, 50257, 1024
_BYTES_PER_PARAMETER = 14  # a bf16 weight; its fp32 copy and two moments


def _shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights of a 12-layer GPT whose training state is close to
    nbytes.
    """
    parameters = nbytes / _BYTES_PER_PARAMETER
    square, linear = 12 * _LAYERS, _VOCABULARY + _POSITIONS + 13 * _LAYERS + 2
    root = (sqrt(linear * linear + 4 * square * parameters) - linear) / (2 * square)
    width = max(8, round(root / 8) * 8)
    # The vocabulary makes up for the rounding of the width.
    rest = square * width * width + (13 * _LAYERS + 2 + _POSITIONS) * width
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (max(64, round((parameters - rest) / width)), width),
        "wpe.weight": (_POSITIONS, width),
    }
    for layer in range(_LAYERS):
        for name in ("ln_1", "ln_2"):
            shapes[f"h.{layer}.{name}.weight"] = shapes[f"h.{layer}.{name}.bias"] = (width,)
        for name, rows, columns in (
            ("attn.c_attn", 3 * width, width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", 4 * width, width),
            ("mlp.c_proj", width, 4 * width),
        ):
            shapes[f"h.{layer}.{name}.weight"] = (rows, columns)
            shapes[f"h.{layer}.{name}.bias"] = (rows,)
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (width,)
    return shapes


def gpt_state(nbytes: int, device: torch.device | str = "cpu") -> State:
    """Returns a training state of about `nbytes`, the same at each call: bf16 weights and, for each
    weight, an fp32 copy, two Adam moments and a step on the CPU, like torch's optimizers.
    """
    generator = torch.Generator(device).manual_seed(0)
    model: dict[str, torch.Tensor] = {}
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for index, (name, shape) in enumerate(_shapes(nbytes).items()):
        master = torch.randn(shape, generator=generator, device=device)
        model[name] = master.to(torch.bfloat16)
        slots[index] = {
            "step": torch.tensor(1000.0 + index, device="cpu"),
            "master": master,
            "exp_avg": torch.randn(shape, generator=generator, device=device).mul_(1e-3),
            "exp_avg_sq": torch.rand(shape, generator=generator, device=device).mul_(1e-6),
        }
    groups = [{"lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "params": list(slots)}]
    return {"model": model, "optimizer": {"state": slots, "param_groups": groups}, "step": 1000}


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each leaf of nested dicts, lists and tuples with its dotted name."""
    if isinstance(tree, (dict, list, tuple)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def flat_tensors(tree: Any) -> dict[str, torch.Tensor]:
    return {name: leaf for name, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)}


def nbytes_of(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in flat_tensors(tree).values())


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a contiguous tensor as a 1-D tensor of bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def differing(loaded: Any, state: Any) -> list[str]:
    """Returns the names of tensors whose type, shape or bytes differ. They are compared one at a
    time, on the device of `state`.
    """
    got, want = flat_tensors(loaded), flat_tensors(state)
    both = [name for name in want if name in got]
    differ = [name for name in both if not same(got[name], want[name])]
    return sorted(got.keys() ^ want.keys()) + differ


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Returns whether type, shape and bytes are equal; the tensors may be on different devices."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    return torch.equal(byte_view(got).to(want.device), byte_view(want))


def touch(tree: Any) -> None:
    """Reads a byte of each page of memory, because a file may be mapped but not read yet; on a GPU,
    waits until all copies have arrived.
    """
    for tensor in flat_tensors(tree).values():
        if tensor.is_cuda:
            torch.cuda.synchronize()
        else:
            byte_view(tensor)[::4096].sum()


TORCH = "torch.save + fsync"
Clocks = dict[str, float]


def nothing() -> None:
    """Does nothing, for a save that is complete when its call returns."""


class Save(NamedTuple):
    """A save whose call has returned.

    Attributes:
        wait_staged: returns when the state may change.
        wait_durable: returns when the bytes are durable.
        facts: returns the library's own statistics of the save, once it is durable.
    """

    wait_staged: Callable[[], object]
    wait_durable: Callable[[], object]
    facts: Callable[[], dict[str, Any]] = dict


class Contestant(NamedTuple):
    """A function that saves to a file, and one that loads the file to a named device.

    Attributes:
        background: whether training continues while the bytes become durable.
    """

    save: Callable[[State, Path], Save]
    load: Callable[[Path, str], Any]
    background: bool = False


@telling
def failures_told(error: BaseException, name: str) -> None:
    """Converts errors of torch and safetensors into a CheckpointError of one line."""
    errors = (RuntimeError, MemoryError, safetensors.SafetensorError)
    if isinstance(error, errors) and not isinstance(error, CheckpointError):
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{name} failed: {line}") from error


def by_torch(state: State, path: Path) -> Save:
    torch_save(state, path)
    return Save(nothing, partial(fsync_path, path))


def by_safetensors(state: State, path: Path) -> Save:
    """Saves only the tensors, by their dotted names."""
    safetensors.torch.save_file(flat_tensors(state), path)
    return Save(nothing, partial(fsync_path, path))


def by_fastckpt(state: State, path: Path, fence: Literal["call", "step"] = "call") -> Save:
    handle = fastckpt.save(state, path, options=fastckpt.SaveOptions(fence=fence))
    return Save(handle.wait_staged, handle.result, lambda: asdict(handle.stats))


def load_by_torch(path: Path, device: str) -> Any:
    return torch_load(path, map_location=device, weights_only=True)


def load_by_safetensors(path: Path, device: str) -> Any:
    return safetensors.torch.load_file(path, device=device)


def load_by_fastckpt(path: Path, device: str) -> Any:
    return fastckpt.load(path, map_location=device)


_STOCK = Contestant(by_torch, load_by_torch)
_SAFETENSORS = Contestant(by_safetensors, load_by_safetensors)
_SAVES = {
    "fastckpt, call fence": Contestant(by_fastckpt, load_by_torch, background=True),
    "fastckpt, step fence": Contestant(
        partial(by_fastckpt, fence="step"), load_by_torch, background=True
    ),
    TORCH: _STOCK,
    "safetensors + fsync": _SAFETENSORS,
}
_LOADS = {
    "fastckpt.load": Contestant(by_fastckpt, load_by_fastckpt),
    "torch.load": _STOCK,
    "safetensors load_file": _SAFETENSORS,
}


def _clocks(contestant: Contestant, state: State, path: Path) -> Clocks:
    """Saves; returns how long training was blocked, and when the bytes were durable."""
    start = time.perf_counter()
    save = contestant.save(state, path)
    if contestant.background:
        blocked_s = time.perf_counter() - start
    save.wait_durable()
    durable_s = time.perf_counter() - start
    return {"blocked_s": blocked_s if contestant.background else durable_s, "durable_s": durable_s}


def _save(own: Path, arguments: argparse.Namespace) -> Result:
    state, path = gpt_state(arguments.size, arguments.device), own / "saved"

    def turn(contestant: Contestant) -> tuple[Clocks, list[str]]:
        clocks = _clocks(contestant, state, path)
        wrong = differing(contestant.load(path, arguments.device), state)
        removed(path)
        return clocks, wrong

    return _compared(_SAVES, TORCH, arguments, state, turn)


def _load(own: Path, arguments: argparse.Namespace) -> Result:
    state, device = gpt_state(arguments.size, arguments.device), arguments.device
    paths = {contestant: own / str(number) for number, contestant in enumerate(_LOADS.values())}
    for name, contestant in _LOADS.items():
        with failures_told(name):
            contestant.save(state, paths[contestant]).wait_durable()
    cold_by: set[str] = set()

    def turn(contestant: Contestant) -> tuple[Clocks, list[str]]:
        clocks, wrong, path = {}, [], paths[contestant]
        for cache in ("cold", "warm") if arguments.warm else ("cold",):
            if cache == "warm":
                make_warm(path)
            else:
                cold_by.add(make_cold(path))
            start = time.perf_counter()
            loaded = contestant.load(path, device)
            touch(loaded)
            clocks[f"{cache}_s"] = time.perf_counter() - start
            wrong += differing(loaded, state)
        return clocks, wrong

    result = _compared(_LOADS, "torch.load", arguments, state, turn)
    return {**result, "cold_by": sorted(cold_by)}


def _compared(
    contestants: dict[str, Contestant],
    base: str,
    arguments: argparse.Namespace,
    state: State,
    turn: Callable[[Contestant], tuple[Clocks, list[str]]],
) -> Result:
    """Compares the medians of all contestants with the base's. `turn` returns clocks and the names
    of tensors that differed.
    """
    rows: dict[str, list[Clocks]] = {name: [] for name in contestants}
    wrong, nbytes, rounds = set(), nbytes_of(state), arguments.rounds
    with progress(nbytes * len(contestants) * (rounds + 1), arguments.what) as moved:
        # The first round is not counted, because in it each contestant allocates memory that later
        # rounds use again.
        for number, name in in_turn([*contestants], rounds, -1, nbytes):
            with failures_told(name):
                clocks, bad = turn(contestants[name])
            if bad:
                wrong.add(f"{name}: {listed(bad)}")
            if number >= 0:
                rows[name].append(clocks)
            moved(nbytes)
    middle = {name: medians(its) for name, its in rows.items()}
    times = {
        name: {clock: middle[base][clock] / took for clock, took in its.items()}
        for name, its in middle.items()
    }
    return {
        "nbytes": nbytes,
        "tensors": len(flat_tensors(state)),
        "device": arguments.device,
        "rounds": rounds,
        "base": base,
        "peers": {
            name: {"rounds": its, "median": middle[name], "times_as_fast": times[name]}
            for name, its in rows.items()
        },
        "wrong": sorted(wrong),
    }


def _lines(result: Result) -> Iterator[str]:
    nbytes, base = result["nbytes"], result["base"]
    yield (
        f"{shown_size(nbytes)} in {result['tensors']} tensors, {result['device']}; "
        f"{shown_rounds(result)}; x: times as fast as {base}; all bytes compared"
    )
    if "cold_by" in result:
        yield f"cold by {', or by '.join(result['cold_by'])}; only fastckpt.load verifies checksums"
    rows = [[""]]
    for clock in result["peers"][base]["median"]:
        rows[0] += [clock.removesuffix("_s"), "x", *(["rate"] if clock != "blocked_s" else [])]
    for name, its in result["peers"].items():
        row = [name]
        for clock, took in its["median"].items():
            row += [shown_time(took), f"{its['times_as_fast'][clock]:.2f}"]
            row += [shown_rate(nbytes / took)] if clock != "blocked_s" else []
        rows.append(row)
    yield from table(rows)


SAVE = Command(
    needed=lambda arguments: int(1.1 * arguments.size),
    measured=_save,
    lines=_lines,
)
LOAD = Command(
    needed=lambda arguments: int(3.1 * arguments.size),
    measured=_load,
    lines=_lines,
)
