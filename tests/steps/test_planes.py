"""codec="planes" in steps: any state comes back bit for bit, whatever reads it; stock safetensors
opens what the decoder of docs/reference/format.md makes of a shard; every damage of one is noticed.

Frames by themselves are tests/engine/test_planes.py's business.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastckpt
from fastckpt import Checkpointer
from fastckpt.cli import main
from fastckpt.errors import CorruptCheckpoint, SaveCancelled
from fastckpt.formats.shard_index import shard_name
from fastckpt.formats.step_names import OURS
from tests.kit.codecs import block_of, header_of, relaxed
from tests.kit.forgeries import Forgery, little_memory, small_shards
from tests.kit.storm import Chance
from tests.kit.trees import EVERY_DTYPE, bits, random_bits

WAIT_S = 60.0
SHARD = "rank-00000.safetensors.planes"


def weights(elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(elements)
    return (torch.randn(elements, generator=generator) * 0.02).to(dtype)


def saved(root: Path, state: dict[str, Any]) -> Path:
    with (
        small_shards(),
        Checkpointer(
            root, codec="planes", options=fastckpt.SaveOptions(durable=False)
        ) as checkpointer,
    ):
        checkpointer.save(5, state).result(WAIT_S)
    return root / "step-00000005"


def frames_of(directory: Path) -> list[bytes]:
    content = (directory / SHARD).read_bytes()
    frames = json.loads((directory / "rank-00000.json").read_bytes())["frames"]
    ends = [sum(frames[: number + 1]) for number in range(len(frames))]
    return [content[end - nbytes : end] for end, nbytes in zip(ends, frames, strict=True)]


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return bits(tensor.clone(memory_format=torch.contiguous_format))  # with strides of its own


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda tensor: tensor,
    lambda tensor: tensor[::2],
    lambda tensor: tensor[1:],
    lambda tensor: tensor[: tensor.numel() // 6 * 6].reshape(2, -1, 3).transpose(0, 1),
    lambda tensor: tensor[:1].expand(5, tensor[:1].numel()),
    lambda tensor: tensor.reshape(0, 7) if not tensor.numel() else tensor.reshape(-1, 1),
]


@settings(relaxed, max_examples=Chance.examples(25))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(EVERY_DTYPE),
            st.integers(0, 9) | st.integers(0, 99_999),
            st.sampled_from(VIEWS),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_any_state_comes_back(tmp_path_factory: pytest.TempPathFactory, drawn: Any) -> None:
    root = tmp_path_factory.mktemp("run")
    state = {}
    for number, (dtype, elements, view, is_constant) in enumerate(drawn):
        tensor = random_bits(dtype, elements, number) if elements else torch.empty(0, dtype=dtype)
        state[str(number)] = view(torch.zeros_like(tensor) if is_constant else tensor)
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    saved(root, state)
    with Checkpointer(root) as checkpointer:
        loaded = checkpointer.load()
        assert checkpointer.restore(target) == 5
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(octets(loaded[name]), octets(tensor)), name
        assert torch.equal(octets(target[name]), octets(tensor)), name


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """Of three blocks, with items of all widths."""
    return {
        "w": weights(3_000_000),
        "half": weights(3_000_001, torch.bfloat16),
        "numbers": torch.arange(100_000),
        "few": torch.arange(7, dtype=torch.uint8),
    }


def test_what_is_documented_decodes_a_shard(disk: Path, state: dict[str, torch.Tensor]) -> None:
    frames = frames_of(saved(disk / "run", state))
    assert len(frames) == 3
    found = safetensors.torch.load(b"".join(map(block_of, frames)))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    kinds = [[kind for _, kind, _ in header_of(frame)] for frame in frames]
    assert kinds[0][:2] == [8, 20] and kinds[1] == [20, 18] and kinds[2][0] == 18
    assert sum(map(len, frames)) < 0.8 * sum(tensor.nbytes for tensor in state.values())


def test_every_command_reads_it(
    disk: Path, state: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    saved(disk / "run", state)
    with Checkpointer(disk / "plain") as checkpointer:
        checkpointer.save(5, state)
    assert main(["verify", str(disk / "run")]) == 0
    assert main(["ls", str(disk / "run")]) == 0
    assert main(["inspect", str(disk / "run")]) == 0 and SHARD in capsys.readouterr().out
    assert main(["diff", str(disk / "run"), str(disk / "plain")]) == 0
    assert main(["convert", str(disk / "run"), str(disk / "a.pt"), "--to", "pt"]) == 0
    with fastckpt.open(disk / "run") as tensors:
        assert tensors.is_verified
        assert torch.equal(tensors["half"][2_999_990:], state["half"][2_999_990:])
    for path in (disk / "run", disk / "a.pt"):
        model = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        fastckpt.load_into(model, path)
        assert all(torch.equal(model[name], tensor) for name, tensor in state.items())


def damaged(root: Path) -> str:
    """What comes of loading: "", or the error."""
    with Checkpointer(root) as checkpointer:
        try:
            checkpointer.load()
        except CorruptCheckpoint as error:
            return str(error)
    return ""


def test_every_byte_of_a_header_counts(disk: Path) -> None:
    directory = saved(disk / "run", {"w": weights(30_000), "few": torch.arange(77).to(torch.uint8)})
    (frame,) = frames_of(directory)
    nbytes = 8 + sum(8 + 4 * len(sizes) for _, _, sizes in header_of(frame))
    with (directory / SHARD).open("r+b", buffering=0) as file:
        for at in range(nbytes):
            os.pwrite(file.fileno(), bytes([frame[at] ^ 1 << at % 8]), at)
            assert "CRC-32 mismatch" in damaged(disk / "run"), at
            os.pwrite(file.fileno(), frame[at : at + 1], at)
    assert not damaged(disk / "run")


def test_a_shard_that_was_cut(disk: Path, state: dict[str, torch.Tensor]) -> None:
    directory = saved(disk / "run", state)
    nbytes = os.path.getsize(directory / SHARD)
    os.truncate(directory / SHARD, nbytes - 1)
    assert f"has {nbytes - 1} bytes, must have {nbytes}" in damaged(disk / "run")
    os.truncate(directory / SHARD, nbytes - 4096)

    def shorter(index: dict[str, Any]) -> None:
        index["frames"][-1] -= 4096
        index["file_nbytes"] -= 4096

    forged = Forgery(directory)
    forged.index(shorter)
    forged.manifest(lambda m: m["writers"][0].update(nbytes=nbytes - 4096))
    assert "CRC-32 mismatch" in damaged(disk / "run")


def test_a_header_that_asks_for_much_memory(disk: Path) -> None:
    directory = saved(disk / "run", {"w": weights(30_000)})
    content = bytearray((directory / SHARD).read_bytes())
    for word in range(1, 8):
        forged = bytearray(content)
        forged[4 * word : 4 * word + 4] = b"\xff\xff\xff\x7f"
        (directory / SHARD).write_bytes(forged)
        with little_memory():
            assert "CRC-32 mismatch" in damaged(disk / "run"), word


def test_old_steps_and_what_was_cancelled_go(disk: Path, state: dict[str, torch.Tensor]) -> None:
    with Checkpointer(disk / "run", codec="planes", keep_last=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state).result(60)
    assert os.listdir(disk / "run") == ["step-00000003"]
    with Checkpointer(disk / "run", codec="planes", drain_rate=1000.0) as checkpointer:
        handle = checkpointer.save(4, state)  # of three blocks, of which the rate lets two through
        handle.cancel()
        assert type(handle.exception(WAIT_S)) is SaveCancelled
    assert os.listdir(disk / "run") == ["step-00000003"]


@pytest.mark.parametrize("codec", [None, "zstd", "planes"])
def test_every_shard_is_known_as_ours(codec: str | None) -> None:
    assert OURS.fullmatch(shard_name(12, codec))
