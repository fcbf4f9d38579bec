"""`fastckpt bench train`: measures the seconds of training that a save costs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fastckpt.arguments.names import listed
from fastckpt.arguments.quantities import shown_size, shown_time
from fastckpt.cli.bench.benchmark import Command, Result, in_turn, shown_rounds, table
from fastckpt.cli.bench.machine import removed
from fastckpt.cli.bench.saves import (
    TORCH,
    Save,
    by_fastckpt,
    by_torch,
    differing,
    failures_told,
    load_by_torch,
    nbytes_of,
    nothing,
)
from fastckpt.cli.progress import progress

_LAYERS, _BATCH = 4, 64
_BYTES_PER_PARAMETER = 12  # a weight and Adam's two moments, fp32
_NONE = "no saves"
_MEASURED_S = 90.0  # no round begins that would end later, except the first
Wait = Callable[[], object]
NO_SAVE = Save(nothing, nothing)


class Training:
    """A training loop of a GPT's wide layers; model and optimizer have about nbytes."""

    def __init__(self, nbytes: int, device: str) -> None:
        width = max(8, int(sqrt(nbytes / _BYTES_PER_PARAMETER / (8 * _LAYERS)) / 8) * 8)
        layers: list[torch.nn.Module] = []
        for _ in range(_LAYERS):
            up, down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
            layers += [torch.nn.LayerNorm(width), up, torch.nn.GELU(), down]
        self.model = torch.nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn((_BATCH, width), device=device)

    def step(self, before_update: Wait) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        before_update()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def window(
        self, saves: int, every: int, save: Callable[[Any, Path], Save], path: Path
    ) -> float:
        """Saves and then trains `every` steps, `saves` times. Returns the seconds until the last
        save is durable.
        """
        start = time.perf_counter()
        save_before = NO_SAVE
        for _ in range(saves):
            save_before.wait_durable()  # one at a time, so that saves do not queue up
            save_before = save(self.state(), path)
            for _ in range(every):
                self.step(save_before.wait_staged)
        save_before.wait_durable()
        if self.batch.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start


def no_save(_state: Any, _path: Path) -> Save:
    return NO_SAVE


def _by_torch(state: Any, path: Path) -> Save:
    by_torch(state, path).wait_durable()  # while training is blocked
    return NO_SAVE


def _by_step_fence(state: Any, path: Path) -> Save:
    return by_fastckpt(state, path, "step")._replace(wait_staged=nothing)  # torch's hook waits


_SAVES: dict[str, Callable[[Any, Path], Save]] = {
    _NONE: no_save,
    TORCH: _by_torch,
    "fastckpt, call fence": by_fastckpt,
    "fastckpt, step fence": _by_step_fence,
}


def _measured(own: Path, arguments: argparse.Namespace) -> Result:
    training, path = Training(arguments.size, arguments.device), own / "saved"
    saves, every, rounds = arguments.saves, arguments.every, arguments.rounds
    start = time.monotonic()
    training.step(nothing)
    nbytes = nbytes_of(training.state())
    windows: dict[str, list[float]] = {name: [] for name in _SAVES}
    wrong = []
    with progress(nbytes * len(_SAVES) * (rounds + 1), "trained") as moved:
        for turn, (number, name) in enumerate(in_turn([*_SAVES], rounds, -1, nbytes)):
            if turn % len(_SAVES) == 0 and number > 0:
                each_s = sum(map(sum, windows.values())) / number
                if time.monotonic() - start + each_s > _MEASURED_S:
                    break
            with failures_told(name):
                if number >= 0:
                    windows[name].append(training.window(saves, every, _SAVES[name], path))
                else:  # the first save allocates memory, and its bytes are compared
                    _SAVES[name](training.state(), path).wait_durable()
                    saved = load_by_torch(path, arguments.device) if path.exists() else None
                    if saved and (bad := differing(saved, training.state())):
                        wrong.append(f"{name}: {listed(bad)}")
            if path.exists():
                removed(path)
            moved(nbytes)
    quiet = windows.pop(_NONE)
    lost = {
        name: [(with_saves - own) / saves for with_saves, own in zip(seconds, quiet, strict=True)]
        for name, seconds in windows.items()
    }
    noise_s = (max(quiet) - min(quiet)) / saves
    above = {
        name: seconds
        for name, seconds in lost.items()
        if min(seconds) > 0 and median(seconds) > noise_s
    }
    return {
        "nbytes": nbytes,
        "device": arguments.device,
        "rounds": len(quiet),
        "every": every,
        "saves": saves,
        "step_s": median(quiet) / (saves * every),
        "window_s_by_round": {_NONE: quiet, **windows},
        "noise_s": noise_s,
        "lost_s": {name: median(above[name]) if name in above else None for name in lost},
        "lost_lowest_s": {name: min(seconds) for name, seconds in above.items()},
        "lost_highest_s": {name: max(noise_s, *seconds) for name, seconds in lost.items()},
        "wrong": wrong,
    }


def _lines(result: Result) -> Iterator[str]:
    every = result["every"]
    yield (
        f"{shown_size(result['nbytes'])} of model and optimizer on {result['device']}, saved "
        f"{result['saves']} times, every {every} steps of {shown_time(result['step_s'])}; "
        f"{shown_rounds(result)}"
    )
    rows = [("", "lost for each save", "range over rounds", "of the training time")]
    for name, lost_s in result["lost_s"].items():
        highest_s, share = result["lost_highest_s"][name], 1 / (every * result["step_s"])
        highest = shown_time(highest_s)
        if lost_s is not None:
            span = f"{shown_time(result['lost_lowest_s'][name])} to {highest}"
            rows.append((name, shown_time(lost_s), span, f"{lost_s * share:.1%}"))
        elif highest_s > 0:
            rows.append(
                (name, "less than noise", f"at most {highest}", f"< {highest_s * share:.1%}")
            )
        else:
            rows.append((name, "none measured", "", ""))
    yield from table(rows)
    if result["rounds"] == 1:
        yield "noise: unknown after 1 round; use --rounds 3 or more"
    else:
        yield (
            f"noise: equal rounds without saves differ by {shown_time(result['noise_s'])} for each "
            "save"
        )


COMMAND = Command(
    # The file, its replacement, and the previous file, which may still take space.
    needed=lambda arguments: int(3.1 * arguments.size),
    measured=_measured,
    lines=_lines,
)
