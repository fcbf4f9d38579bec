"""What a stream could not do becomes one error, with the place, what lies there and what is left.

No file is read: a stream is whatever tells a fault.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from fastckpt.engine.read_stream import DAMAGE, PEERS, Fault
from fastckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    DeviceError,
    PeerFailed,
    StorageError,
)
from fastckpt.plan.image import BlockChecksums
from fastckpt.reading.verified import Body
from fastckpt.state.targets import takes_bytes
from fastckpt.storage.file_system import Storage
from fastckpt.storage.input_files import PosixFile

INDEX = BlockChecksums(body_nbytes=2500, block_bytes=1000, block_crcs=(1, 2, 3), tail=b"")


class Refusing:
    """A stream that can do nothing, for one reason."""

    def __init__(self, reason: Fault) -> None:
        self._reason = reason

    def readinto(self, _target: Any, _offset: int) -> bool:
        return False

    def fault(self) -> Fault:
        return self._reason


def error_of(fault: Fault, **told: Any) -> CheckpointError:
    body = Body(cast(Any, None), PosixFile(Storage(), 0, "a.pt"), INDEX, **told)
    with pytest.raises(CheckpointError) as caught:
        body.read_all(cast(Any, Refusing(fault)))
    return caught.value


def test_a_read_that_failed_names_operation_path_offset_and_errno() -> None:
    error = error_of(Fault("read", 77, 5))
    assert isinstance(error, StorageError)
    assert (error.op, error.path, error.offset, error.errno) == ("read", "a.pt", 77, 5)


@pytest.mark.parametrize(("block", "place"), [(0, "0 to 1000"), (2, "2000 to 2500")])
def test_damage_names_the_bytes_of_the_block_and_what_lies_there(block: int, place: str) -> None:
    asked: list[tuple[int, int]] = []

    def damaged(begin: int, end: int) -> str:
        asked.append((begin, end))
        return "'w'"

    error = error_of(Fault(DAMAGE, block), damaged=damaged)
    assert type(error) is CorruptCheckpoint
    told = f"'a.pt' is damaged: CRC-32 mismatch in bytes {place}"
    assert str(error) == f"{told}, in 'w'"
    assert asked == [tuple(map(int, place.split(" to ")))]
    assert str(error_of(Fault(DAMAGE, block))) == told


def test_a_device_and_other_ranks_are_told_with_what_is_left() -> None:
    error = error_of(Fault("copy", 5, 700, "ILLEGAL_ADDRESS"), outcome="nothing was loaded")
    assert type(error) is DeviceError
    assert str(error) == (
        "copying 'a.pt' to a GPU, at offset 5, failed: ILLEGAL_ADDRESS; nothing was loaded"
    )
    error = error_of(Fault(PEERS, text="rank 3 gave up", ranks=(3,)), outcome="nothing was loaded")
    assert isinstance(error, PeerFailed) and error.ranks == (3,)
    assert str(error) == "the load of 'a.pt' failed: rank 3 gave up; nothing was loaded"


def test_bytes_go_only_to_memory_that_is_the_elements() -> None:
    plain = torch.zeros(3, 4)
    kinds = {"cpu"}
    assert takes_bytes(plain, kinds) and takes_bytes(plain.t()[1:], kinds)
    assert takes_bytes(torch.nn.Parameter(plain), kinds)
    assert not takes_bytes(plain, {"cuda"})
    assert not takes_bytes(plain.to_sparse(), kinds)
    numbers = torch.zeros(3, dtype=torch.complex64)
    assert not takes_bytes(numbers.conj(), kinds)
    assert not takes_bytes(numbers.conj().imag, kinds)  # negated when it is looked at
