"""How a tensor is cut into parts that are read one after the other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fastckpt.cli.shared_arguments import parts


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 400), (1, 1, 50, 2), (2, 1, 300), (), (0, 5)])
def test_parts_are_runs_that_make_up_the_tensor(shape: Any) -> None:
    numbers = torch.arange(float(math.prod(shape))).view(shape)
    found = [numbers[part] for part in parts(shape, 4, 40)]
    assert torch.cat([part.reshape(-1) for part in found]).tolist() == [*range(numbers.numel())]
    assert all(part.numel() <= 10 for part in found)


def test_an_element_may_be_larger_than_a_part() -> None:
    assert len([*parts((3, 2), 8, 4)]) == 6
