"""Saves from a GPU by GPUDirect Storage: what comes of them, of refusals, and of the choice.

On the devices of kit/accelerator.py, with a stub of cuFile. Must not know how blocks are moved.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastckpt
from fastckpt.engine.gds import BLOCKS
from fastckpt.formats import shard_index
from fastckpt.plan.image import BLOCK_BYTES
from tests.kit import accelerator
from tests.kit.accelerator import Runtime, here
from tests.kit.cuda_stub import OUT_OF_MEMORY, CudaStub
from tests.kit.cufile_stub import CufileStub
from tests.kit.noise import noise
from tests.kit.saves import warnings_in
from tests.kit.storm import Chance

MIB = 1 << 20
WAIT_S = 60.0


def octets(nbytes: int, seed: int = 0) -> torch.Tensor:
    return noise(nbytes, seed).to(here())


def same(path: Path, state: dict[str, torch.Tensor]) -> None:
    """Verified by us, and as torch reads it."""
    for loaded in (fastckpt.load(path, map_location="cpu"), torch.load(path, map_location="cpu")):
        assert all(torch.equal(loaded[key], value.cpu()) for key, value in state.items())


@pytest.mark.parametrize("fence", ["call", "step"])
def test_blocks_of_a_gpu_never_come_to_the_host(
    cufile: CufileStub, driver: CudaStub, disk: Path, fence: str
) -> None:
    state = {"w": octets(40 * MIB + 12345), "b": octets(1000, 1), "host": torch.ones(3 * MIB)}
    stats = fastckpt.save(
        state, disk / "a.pt", options=fastckpt.SaveOptions(staging="gds", fence=fence)
    ).result(WAIT_S)
    assert stats.staging == "gds" and "cuFile" in stats.staging_why
    same(disk / "a.pt", state)
    whole = sum(1 for _ in range(0, 40 * MIB + 12345, BLOCK_BYTES)) - 2
    assert cufile.calls("cuFileWrite") >= whole
    assert sum(op.nbytes for op in driver.log() if op.kind == 0) <= 3 * BLOCK_BYTES


def test_the_file_is_the_same_either_way(cufile: CufileStub, disk: Path) -> None:
    state = {"w": octets(28 * MIB), "v": octets(12 * MIB + 77, 1), "s": octets(99, 2)}
    for way in ("host", "gds"):
        fastckpt.save(state, disk / f"{way}.pt", options=fastckpt.SaveOptions(staging=way)).result(
            WAIT_S
        )
    assert (disk / "host.pt").read_bytes() == (disk / "gds.pt").read_bytes()


@settings(
    max_examples=Chance.examples(6),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(sizes=st.lists(st.integers(0, 20 * MIB), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_any_sizes(cufile: CufileStub, disk: Path, sizes: list[int], seed: int) -> None:
    state = {str(i): octets(nbytes, seed + i) for i, nbytes in enumerate(sizes)}
    fastckpt.save(
        state, disk / "a.pt", options=fastckpt.SaveOptions(staging="gds", durable=False)
    ).result(WAIT_S)
    same(disk / "a.pt", state)
    with fastckpt.Checkpointer(
        disk / "run", options=fastckpt.SaveOptions(staging="gds", durable=False)
    ) as checkpointer:
        checkpointer.save(1, state).result(WAIT_S)
        loaded = checkpointer.load()
    assert all(torch.equal(loaded[key], value.cpu()) for key, value in state.items())


def test_a_step(cufile: CufileStub, disk: Path) -> None:
    state = {f"w{i}": octets(18 * MIB + i, i) for i in range(3)}
    with fastckpt.Checkpointer(
        disk / "run", options=fastckpt.SaveOptions(staging="gds")
    ) as checkpointer:
        assert checkpointer.save(1, state).result(WAIT_S).staging == "gds"
        loaded = checkpointer.load()
    assert all(torch.equal(loaded[key], value.cpu()) for key, value in state.items())
    assert cufile.calls("cuFileWrite") >= 5
    assert shard_index.shard_name(0, None) in {p.name for p in disk.rglob("*")}


def test_what_is_compressed_comes_to_the_host(cufile: CufileStub, disk: Path) -> None:
    state = {"w": octets(20 * MIB)}
    with fastckpt.Checkpointer(
        disk / "run", options=fastckpt.SaveOptions(staging="gds"), codec="zstd"
    ) as checkpointer:
        assert checkpointer.save(1, state).result(WAIT_S).staging == "pinned"
        assert torch.equal(checkpointer.load()["w"], state["w"].cpu())
    assert cufile.calls("cuFileWrite") == 0


def test_more_than_the_blocks_hold(cufile: CufileStub, disk: Path) -> None:
    state = {"w": octets((BLOCKS + 1) * BLOCK_BYTES)}
    fastckpt.save(state, disk / "a.pt", options=fastckpt.SaveOptions(staging="gds")).result(WAIT_S)
    same(disk / "a.pt", state)


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("cuFileWrite", 0),
        ("cuFileWrite", 2),
        ("cuFileHandleRegister", 2),
        ("cuFileBufRegister", 0),
    ],
)
def test_what_cufile_refuses_goes_through_the_host(
    cufile: CufileStub, disk: Path, caplog: pytest.LogCaptureFixture, call: str, after: int
) -> None:
    """With one warning for many saves, and nothing lost."""
    state = {"w": octets(28 * MIB)}
    cufile.fail(call, 5030, after=after)
    with caplog.at_level(logging.WARNING, "fastckpt"):
        for number in range(3):
            handle = fastckpt.save(
                state, disk / f"{number}.pt", options=fastckpt.SaveOptions(staging="gds")
            )
            state["w"].add_(0)
            stats = handle.result(WAIT_S)
            same(disk / f"{number}.pt", state)
    if call == "cuFileWrite" or after == 0:
        assert "through the host" in stats.staging_why or "is unavailable" in stats.staging_why
        assert len(warnings_in(caplog.records)) == 1


def test_short_writes(cufile: CufileStub, disk: Path) -> None:
    cufile.at_most(MIB + 4096)
    state = {"w": octets(30 * MIB)}
    fastckpt.save(state, disk / "a.pt", options=fastckpt.SaveOptions(staging="gds")).result(WAIT_S)
    same(disk / "a.pt", state)


def test_without_cufile(
    driver: CudaStub, runtime: Runtime, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver.configure()
    runtime.driver = driver
    with accelerator.installed(runtime, driver.path), caplog.at_level(logging.WARNING, "fastckpt"):
        state = {"w": octets(20 * MIB)}
        for number in range(2):
            path = disk / f"{number}.pt"
            stats = fastckpt.save(state, path, options=fastckpt.SaveOptions(staging="gds")).result(
                WAIT_S
            )
            assert stats.staging == "pinned"
            same(path, state)
    (warning,) = warnings_in(caplog.records)
    assert "GPUDirect Storage" in warning.message


def test_want_of_memory_is_for_one_save(cufile: CufileStub, driver: CudaStub, disk: Path) -> None:
    state = {"w": octets(20 * MIB)}
    for number, staging in enumerate(["pinned", "gds"]):
        driver.fail("cuMemAlloc_v2", OUT_OF_MEMORY, times=1 - number)
        stats = fastckpt.save(
            state, disk / f"{number}.pt", options=fastckpt.SaveOptions(staging="gds")
        ).result(WAIT_S)
        assert stats.staging == staging, stats.staging_why
