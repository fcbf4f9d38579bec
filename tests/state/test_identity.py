"""Two tensors are the same elements if they lie in the same memory and are read there alike; what
has no memory is like no other.
"""

from __future__ import annotations

import pytest
import torch

import fastckpt
from fastckpt.state.kinds import memory_of


def test_the_same_elements() -> None:
    weight = torch.randn(4, 4)
    for same in (weight.detach(), weight.view(4, 4), torch.nn.Parameter(weight), weight.t().t()):
        assert memory_of(same) == memory_of(weight) is not None
    for other in (weight.t(), weight[:2], weight.view(16), weight.view(torch.int32)):
        assert memory_of(other) not in (memory_of(weight), None)


def test_what_is_read_negated_or_conjugated_is_another() -> None:
    numbers = torch.randn(5, dtype=torch.complex64)
    conjugate = numbers.conj()
    assert conjugate.data_ptr() == numbers.data_ptr() and conjugate.is_conj()
    assert memory_of(conjugate) not in (memory_of(numbers), None)
    assert memory_of(conjugate.conj()) == memory_of(numbers)
    negated = conjugate.imag
    assert negated.data_ptr() == numbers.imag.data_ptr() and negated.is_neg()
    assert memory_of(negated) not in (memory_of(numbers.imag), None)
    assert memory_of(negated) == memory_of(numbers.conj().imag)


def freed() -> torch.Tensor:
    tensor = torch.ones(100)[3:]  # its address is not 0, for all that nothing is there
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "without",
    [
        torch.empty(0, 3),
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        freed(),
    ],
    ids=["empty", "meta", "sparse", "freed"],
)
def test_what_has_no_memory_of_its_own(without: torch.Tensor) -> None:
    assert memory_of(without) is None


@pytest.mark.parametrize("count", [100, 300_000])
def test_a_freed_storage_is_named(count: int, disk: object) -> None:
    weight = torch.ones(count)
    weight.untyped_storage().resize_(0)
    state = {"model": {"w": weight}}
    with (
        fastckpt.Checkpointer(f"{disk}/run") as checkpointer,
        pytest.raises(TypeError, match="'model/w' is without memory, like FSDP's parameters"),
    ):
        checkpointer.save(1, state)
    with pytest.raises(TypeError, match="hold all of the state: 'model/w' is without memory"):
        fastckpt.export(state, f"{disk}/a")
