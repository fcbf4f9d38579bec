"""What is tested of GPUs without one, on a GPU: the same tests, on torch.cuda and NVIDIA's driver.

They also run over the stub of the driver, by the same way (tests/kit/hardware.py), so that the way
itself is tested where there is no GPU: some of them in `make test`. Must not know the engine's
insides.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from tests.gpu import nvidias_cufile, test_gpu, test_gpu_load
from tests.gpu.nvidias_cufile import cufile as cufile_of_nvidia  # noqa: F401
from tests.kit import accelerator, cuda_stub, hardware
from tests.kit.devices import places, way
from tests.kit.hardware import FUNCTIONS, Hardware, TorchCuda
from tests.kit.programs import run_python

__all__ = ["way"]
STUB, GPU = "stub", pytest.param("GPU", marks=pytest.mark.gpu)
GIVEN = os.environ.get("FASTCKPT_TEST_CUFILE")
TESTED = [
    test_gpu.test_a_state_comes_back_where_it_was,
    test_gpu.test_saves_in_flight_each_have_their_own,
    test_gpu.test_every_save_has_what_the_state_was,
    test_gpu.test_a_change_before_the_step_fails_loudly,
    test_gpu.test_small_buffers_may_change_in_the_forward_pass,
    test_gpu.test_more_than_the_budget_is_copied_block_by_block,
    test_gpu.test_a_slow_file_system_holds_nobody_up,
    test_gpu.test_an_interrupted_call_commits_nothing_that_was_changed,
    test_gpu_load.test_load_reads_straight_to_the_device,
    test_gpu_load.test_restore_in_place,
    test_gpu_load.test_damage_is_found_before_a_device_gets_it,
    test_gpu_load.test_what_is_unpickled_may_compute_at_once,
]
WAY = [  # what shows that the way holds streams, fills memory, saves and loads
    test_gpu.test_a_state_comes_back_where_it_was,
    test_gpu.test_small_buffers_may_change_in_the_forward_pass,
    test_gpu_load.test_restore_in_place,
    test_gpu_load.test_what_is_unpickled_may_compute_at_once,
]
BY_CUFILE = {
    "test_a_load_by_cufile": nvidias_cufile.test_a_load,
    "test_steps_by_cufile": nvidias_cufile.test_steps,
    "test_the_file_by_cufile_is_the_same": nvidias_cufile.test_the_file_is_the_same_either_way,
    "test_every_save_by_cufile": nvidias_cufile.test_every_save_has_what_the_state_was,
}
globals().update({test.__name__: test for test in TESTED} | BY_CUFILE)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "place" in metafunc.fixturenames:
        # Over the stub, cuFile needs what test_gds_real.py gives it.
        on_gpu_only = metafunc.function in BY_CUFILE.values() and not GIVEN
        again = [test for test in TESTED if test not in WAY]
        later = [pytest.mark.torture] if metafunc.function in again else []
        stub = pytest.param(STUB, marks=later)
        metafunc.parametrize("place", [GPU] if on_gpu_only else [stub, GPU], scope="module")


@pytest.fixture
def library(place: str, request: pytest.FixtureRequest) -> Path | None:
    """Torch's device of the stub, which a machine with a GPU may have no compiler for."""
    return request.getfixturevalue("accelerator_library") if place == STUB else None


@pytest.fixture
def runtime(library: Path | None) -> Any:
    if library is not None:
        return accelerator.registered(library)
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    return TorchCuda()


@pytest.fixture(scope="session")
def double(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The stub of the driver: one, as NVIDIA's cuFile opens it once in a process."""
    return str(cuda_stub.built_for_others(tmp_path_factory.mktemp("driver")))


@pytest.fixture
def driver(place: str, runtime: Any, request: pytest.FixtureRequest) -> Iterator[Hardware]:
    path = request.getfixturevalue("double") if place == STUB else hardware.LIBRARY
    made = Hardware(runtime, path)
    if place == STUB:
        runtime.driver = made  # torch's own copies come after what the current stream was given
    else:
        runtime.warm_up()
    yield made
    made.close()
    runtime.reset()


@pytest.fixture
def gpu(driver: Hardware, runtime: Any) -> Iterator[Hardware]:
    with accelerator.installed(runtime, driver.path):
        yield driver
        driver.configure()


@pytest.fixture
def cufile(runtime: Any, request: pytest.FixtureRequest) -> Any:
    if not os.access("/proc/modules", os.R_OK):
        pytest.skip("without /proc/modules cuFileDriverOpen never returns")
    return request.getfixturevalue("cufile_of_nvidia")


def test_functions_of_the_driver_are_called_as_nvidia_declares_them(tmp_path: Path) -> None:
    headers = places("include/cuda.h")
    if not headers:
        pytest.skip("NVIDIA's cuda.h is not on this machine")
    pointers = [
        f"CUresult (*const f{number})({', '.join(types)}) = &{name};"
        for number, (name, types) in enumerate(FUNCTIONS.items())
    ]
    values = (
        f"static_assert({hardware.NON_BLOCKING} == CU_STREAM_NON_BLOCKING && "
        f"{hardware.MAPPED} == CU_MEMHOSTALLOC_DEVICEMAP && "
        f'{hardware.AT_LEAST} == CU_STREAM_WAIT_VALUE_GEQ, "");'
    )
    source = tmp_path / "functions.cc"
    source.write_text("\n".join(["#include <cuda.h>", *pointers, values]))
    for header in headers:
        command = ["g++", "-fsyntax-only", "-isystem", str(header.parent), str(source)]
        assert subprocess.run(command, capture_output=True, text=True).stderr == ""


BEGIN = """
import os, sys, threading
from pathlib import Path
import torch, fastckpt
from fastckpt.engine.devices import Devices
from fastckpt.saving import pipeline
from tests.kit import accelerator
from tests.kit.hardware import Hardware, TorchCuda

library, driver, path = sys.argv[1:]
runtime = accelerator.registered(Path(library)) if library != "-" else TorchCuda()
stub = Hardware(runtime, driver)
pipeline._current = pipeline.Pipeline(None, 64 << 20, Devices(runtime.kind, runtime, driver))
state = {"w": torch.ones(3_000_000, device=runtime.kind), "host": torch.ones(10)}
stub.hold(True)
handle = fastckpt.save(state, path, options=fastckpt.SaveOptions(fence=FENCE))
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "program", [test_gpu.EXIT, pytest.param(test_gpu.FORK, marks=pytest.mark.torture)]
)
def test_a_save_in_flight_outlives_the_program_and_is_not_the_child_s(
    driver: Hardware, library: Path | None, disk: Path, program: str
) -> None:
    begin = BEGIN.replace("FENCE", repr("call" if program is test_gpu.EXIT else "step"))
    ended = run_python(begin + program, library or "-", driver.path, disk / "a.pt", frees=True)
    assert "FAILED" not in ended.stderr and "Error" not in ended.stderr
    loaded = fastckpt.load(disk / "a.pt", map_location="cpu")
    assert loaded["w"].eq(1).all() and len(loaded["w"]) == 3_000_000
