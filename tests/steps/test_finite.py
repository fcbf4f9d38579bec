"""A step with numbers that are infinite or not a number is refused where that is asked for, and no
other: what counts is what was copied, and so would be committed.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt import Checkpointer, PeerFailed, PerRank, _engine
from fastckpt.errors import CheckpointError
from fastckpt.steps.plan import _NON_FINITE
from tests.crews import cancel_bodies as bodies
from tests.crews.group_crew import Crew

WAIT_S = 60.0
BLOCK = 64 << 10
RANKS_IMPORT = "tests.crews.cancel_bodies"
DTYPES = [*_NON_FINITE]


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """At least two blocks of every bit pattern of up to two bytes; of wider numbers, every exponent
    with both signs, and with mantissas of zeros, of ones and of one bit.
    """
    width = dtype.itemsize
    if width <= 2:
        bits = torch.arange(1 << 8 * width)
    else:
        mantissa = 23 if width == 4 else 52
        high = torch.arange(1 << (8 * width - mantissa)) << mantissa
        bits = torch.cat([high | low for low in (0, 1, (1 << mantissa) - 1)])
    octets = bits.view(torch.uint8).view(-1, 8)[:, :width].flatten()
    return octets.repeat(-(-2 * BLOCK // len(octets))).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("begin", [8, BLOCK - 8, BLOCK])
def test_the_engine_counts_what_it_staged(dtype: torch.dtype, begin: int) -> None:
    """Between other bytes, of which none count, across blocks, from any address."""
    values = every_value(dtype)
    expected = int((~values.to(torch.float64).isfinite()).sum())
    around, width = 0xFF, dtype.itemsize
    content = bytearray([around]) * (begin + values.nbytes + 9)
    content[1 + begin : 1 + begin + values.nbytes] = values.view(torch.uint8).numpy().tobytes()
    memory = torch.frombuffer(content, dtype=torch.uint8)
    segments = array("Q", [0, len(content) - 1, memory.data_ptr() + 1])
    middle = begin + values.nbytes // 2 // width * width
    mask = _NON_FINITE[dtype]
    runs = array("Q", [begin, middle, width, mask, middle, begin + values.nbytes, width, mask])
    engine = _engine.Engine(16 * BLOCK, BLOCK, 2)
    backend = _engine.threads_backend(1)
    fd = os.memfd_create("staged")
    try:
        allowance = _engine.Allowance(2)
        job = engine.stage(segments, array("Q"), allowance, 2, [], None, runs)
        job.write_to(fd, 0, backend, False)
        assert job.wait_written(WAIT_S) and job.failure() is None
        assert sum(job.non_finite()) == expected > 0 and min(job.non_finite()) > 0
    finally:
        engine.close()
        backend.close()
        os.close(fd)


def state(**changed: Any) -> dict[str, Any]:
    """Tensors in shards and small ones, of which one crosses the end of a block."""
    model: dict[str, Any] = {
        "large": torch.ones((9 << 20) // 4),
        "small": torch.ones(10, dtype=torch.bfloat16),
        "number": torch.tensor(1.0, dtype=torch.float64),
        "counts": torch.full((5,), 0x7FC00000, dtype=torch.int32),
    }
    return {"model": model | changed, "own": PerRank(math.nan), "loss": math.inf}


def with_one(bad: float, shape: tuple[int, ...], at: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.ones(shape, dtype=dtype)
    values.flatten()[at] = bad
    return values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("large", with_one(math.nan, ((9 << 20) // 4,), (8 << 20) // 4, torch.float32)),
        ("large", with_one(-math.inf, ((9 << 20) // 2,), -1, torch.float16)),
        ("small", with_one(math.inf, (10,), 3, torch.bfloat16)),
        ("number", torch.tensor(math.nan)),
        ("view", with_one(math.nan, (300, 1000), 7, torch.float32).t()),
    ],
)
@pytest.mark.parametrize("codec", [None, "planes"])
def test_a_step_is_refused(disk: Path, name: str, value: torch.Tensor, codec: Any) -> None:
    with Checkpointer(disk, check_finite=True, codec=codec, keep_last=1) as checkpointer:
        checkpointer.save(1, state()).result(WAIT_S)
        refusal = rf"'model/{name}' has elements that .* \(1 on rank 0\); nothing was"
        with pytest.raises(CheckpointError, match=refusal) as told:
            checkpointer.save(2, state(**{name: value})).result(WAIT_S)
        assert str(disk / "step-00000002") in str(told.value)
        assert checkpointer.steps() == [1]
        into = state()
        into["model"]["small"].zero_()
        assert checkpointer.restore(into) == 1
        assert bool((into["model"]["small"] == 1).all()) and into["model"]["number"] == 1
        checkpointer.save(3, state(**{name: torch.ones_like(value)})).result(WAIT_S)
    with Checkpointer(disk) as checkpointer:
        checkpointer.save(4, state(**{name: value})).result(WAIT_S)


@pytest.mark.parametrize("fence", ["call", "step"])
def test_what_was_copied_counts(disk: Path, fence: Any) -> None:
    """Not what became of it; and not what lies between the elements of a view."""
    between = with_one(math.nan, (1 << 20,), 1, torch.float32)
    held = state(between=between[::2])
    with Checkpointer(
        disk, check_finite=True, options=fastckpt.SaveOptions(fence=fence)
    ) as checkpointer:
        handle = checkpointer.save(1, held)
        handle.wait_staged(WAIT_S)
        for value in held["model"].values():
            if value.is_floating_point():
                value.fill_(math.nan)
        assert handle.result(WAIT_S).committed_s is not None
        refusal = r"'model/number' has .* on rank 0\), and 3 more tensors have such elements"
        with pytest.raises(CheckpointError, match=refusal):
            checkpointer.save(2, held).result(WAIT_S)


@pytest.mark.multiprocess
def test_all_ranks_refuse(crew: Callable[[int], Crew], disk: Path) -> None:
    """The second one writes the end of the tensor, which has the number."""
    first, second = crew(2)(bodies.refuse_numbers, str(disk))
    assert type(first[0].error) is PeerFailed and type(second[0].error) is CheckpointError
    for refused, after in (first, second):
        assert "'w' has elements that are infinite or not a number (1" in str(refused.error)
        assert "on rank 1); nothing was committed" in str(refused.error)
        assert after.error is None
    with fastckpt.open(disk) as opened:
        assert opened["w"][-1:].item() == 1.0
