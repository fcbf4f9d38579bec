"""Fixtures that test modules share: a directory on a real disk, a save that has committed, the
comparison of two object graphs, a device for tensors, and the check that nothing stays behind. Must
not know what any one test is about.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import numpy
import pytest
import torch

import fastckpt
from fastckpt.saving import pipeline
from fastckpt.storage.file_system import Storage
from fastckpt.storage.objects import PathStorage
from tests.crews.group_crew import Crew, Nursery
from tests.kit import accelerator, cuda_stub, cufile_stub
from tests.kit.accelerator import Runtime
from tests.kit.cuda_stub import CudaStub
from tests.kit.cufile_stub import CufileStub
from tests.kit.mounts import file_system
from tests.kit.options import gathered
from tests.kit.paths import ROOT
from tests.kit.saves import give_up_leases, saving_threads
from tests.kit.storm import SUITE_SEED, Chance, Storm

BUILD = ROOT / "build"
TEMPORARIES = ".*.tmp"
LONG_S = 900.0  # what may take longer has a limit of its own
BEGUN = pytest.StashKey[float]()
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
ATOMS = (int, str, bytes, complex, type(None), type, torch.dtype, torch.device, torch.layout)
COMPRESSED_PARTS = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def octets(storage: torch.UntypedStorage) -> numpy.ndarray:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu().numpy()


class Likeness:
    """One walk over an expected object and what came back for it; the first difference fails.

    Alike means: same types, same values bit for bit (so NaN equals itself), and the same sharing,
    both of objects and of storages: what was one stays one, what was two stays two.
    """

    def __init__(self) -> None:
        self._came_back_as: dict[int, Any] = {}
        self._kept: list[Any] = []  # an id says nothing once its object is gone
        self._storage_of: dict[int, int] = {}
        self._source_of: dict[int, int] = {}

    def check(self, actual: Any, expected: Any, where: str = "obj") -> None:
        if torch.is_storage(expected):
            self._check_stored_storage(actual, expected, where)
            return
        assert type(actual) is type(expected), where
        if isinstance(expected, ATOMS):
            assert actual == expected, where
        elif isinstance(expected, float):
            assert struct.pack("d", actual) == struct.pack("d", expected), where
        elif isinstance(expected, tuple):
            self._check_items(actual, expected, where)
        elif id(expected) in self._came_back_as:
            assert actual is self._came_back_as[id(expected)], f"{where}: no longer one object"
        else:
            self._came_back_as[id(expected)] = actual
            self._kept.append(expected)
            self._check_object(actual, expected, where)

    def _check_object(self, actual: Any, expected: Any, where: str) -> None:
        if isinstance(expected, torch.Tensor):
            self._check_tensor(actual, expected, where)
        elif isinstance(expected, torch.Generator):
            self.check(actual.get_state(), expected.get_state(), f"{where}.get_state()")
        elif type(expected).__module__ == "numpy":
            assert actual.dtype == expected.dtype and actual.shape == expected.shape, where
            assert actual.tobytes() == expected.tobytes(), where
        elif isinstance(expected, dict):
            assert list(actual) == list(expected), where
            for key, value in expected.items():
                self.check(actual[key], value, f"{where}[{key!r}]")
            self._check_attributes(actual, expected, where)
        elif isinstance(expected, list):
            self._check_items(actual, expected, where)
        elif callable(expected) and hasattr(expected, "__qualname__"):
            assert actual is expected, where
        elif hasattr(expected, "__dict__") or hasattr(expected, "__slots__"):
            self._check_attributes(actual, expected, where)
        else:
            assert actual == expected, where

    def _check_items(self, actual: Any, expected: Any, where: str) -> None:
        assert len(actual) == len(expected), where
        for index, item in enumerate(expected):
            self.check(actual[index], item, f"{where}[{index}]")

    def _check_attributes(self, actual: Any, expected: Any, where: str) -> None:
        def attributes(obj: Any) -> dict[str, Any]:
            slots = getattr(type(obj), "__slots__", ())
            held = {name: getattr(obj, name) for name in slots if hasattr(obj, name)}
            return held | getattr(obj, "__dict__", {})

        there = attributes(actual)
        assert list(there) == list(attributes(expected)), where
        for name, value in attributes(expected).items():
            self.check(there[name], value, f"{where}.{name}")

    def _check_tensor(self, actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
        for name in ("dtype", "layout", "device", "requires_grad", "is_quantized", "is_nested"):
            assert getattr(actual, name) == getattr(expected, name), f"{where}.{name}"
        if hasattr(expected, "__tensor_flatten__"):
            for name in expected.__tensor_flatten__()[0]:
                self.check(getattr(actual, name), getattr(expected, name), f"{where}.{name}")
            return
        self._check_attributes(actual, expected, where)
        if torch.nn.parameter.is_lazy(expected):
            return
        if expected.is_nested:
            for name in ("_nested_tensor_size", "_nested_tensor_strides", "values"):
                self.check(getattr(actual, name)(), getattr(expected, name)(), f"{where}.{name}()")
            return
        assert actual.shape == expected.shape, f"{where}.shape"
        if expected.layout is torch.sparse_coo:
            assert actual.is_coalesced() == expected.is_coalesced(), where
            parts = ("_indices", "_values")
        elif expected.layout in COMPRESSED_PARTS:
            parts = (*COMPRESSED_PARTS[expected.layout], "values")
        else:
            parts = ()
            self._check_strided(actual, expected, where)
        for name in parts:
            self.check(getattr(actual, name)(), getattr(expected, name)(), f"{where}.{name}()")

    def _check_strided(self, actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
        for name in ("stride", "storage_offset", "is_conj", "is_neg"):
            assert getattr(actual, name)() == getattr(expected, name)(), f"{where}.{name}()"
        if expected.is_quantized:
            assert actual.qscheme() == expected.qscheme(), where
            affine = expected.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
            names = ("q_scale", "q_zero_point")
            if not affine:
                names = ("q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis")
            for name in names:
                self.check(getattr(actual, name)(), getattr(expected, name)(), f"{where}.{name}()")
        self._check_storage(actual.untyped_storage(), expected.untyped_storage(), where)

    def _check_stored_storage(self, actual: Any, expected: Any, where: str) -> None:
        # torch gives every storage back as a TypedStorage, an untyped one as one of bytes.
        assert type(actual) is torch.storage.TypedStorage, where
        typed = isinstance(expected, torch.storage.TypedStorage)
        assert actual.dtype == (expected.dtype if typed else torch.uint8), where
        source = expected._untyped_storage if typed else expected
        self._check_storage(actual._untyped_storage, source, where)

    def _check_storage(
        self, actual: torch.UntypedStorage, expected: torch.UntypedStorage, where: str
    ) -> None:
        assert actual.device == expected.device, where
        if expected.device.type == "meta":
            return
        assert actual.nbytes() == expected.nbytes(), f"{where}: not the whole storage"
        if expected.nbytes() == 0:
            return  # torch gives each tensor without bytes a storage of its own
        first = expected._cdata not in self._storage_of
        came_back_as = self._storage_of.setdefault(expected._cdata, actual._cdata)
        assert came_back_as == actual._cdata, f"{where}: a shared storage came back as two"
        source = self._source_of.setdefault(actual._cdata, expected._cdata)
        assert source == expected._cdata, f"{where}: two storages came back as one"
        if first:
            self._kept += [actual, expected]
            same = numpy.array_equal(octets(actual), octets(expected))
            assert same, f"{where}: other bytes"


@pytest.fixture
def assert_same() -> Callable[[Any, Any], None]:
    """`assert_same(actual, expected)`: `actual` is what must come back for `expected`."""

    def check(actual: Any, expected: Any) -> None:
        Likeness().check(actual, expected)

    return check


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> CudaStub:
    return CudaStub(cuda_stub.built(tmp_path_factory.mktemp("driver")))


@pytest.fixture(scope="session")
def accelerator_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return accelerator.built(tmp_path_factory.mktemp("accelerator"))


@pytest.fixture
def gpu(driver: CudaStub, runtime: Runtime) -> Iterator[CudaStub]:
    """torch has the device, fastckpt's pipeline knows it; nothing of it is alive afterwards."""
    driver.configure()
    runtime.driver = driver
    before = driver.alive()
    with accelerator.installed(runtime, driver.path):
        yield driver
        driver.configure()
        runtime.reset()
    assert driver.alive() == before


@pytest.fixture
def runtime(accelerator_library: Path) -> Runtime:
    return accelerator.registered(accelerator_library)


@pytest.fixture(scope="module")
def nursery(request: pytest.FixtureRequest) -> Iterator[Nursery]:
    """Forks ranks that have imported the test module, or what it names as RANKS_IMPORT."""
    started = Nursery(getattr(request.module, "RANKS_IMPORT", request.module.__name__))
    yield started
    started.close()


@pytest.fixture
def drained(disk: Path) -> Iterator[None]:
    """What a save still removes after its commit is gone before the directory is."""
    yield
    pipeline.current().drain()


@pytest.fixture
def crew(nursery: Nursery) -> Callable[..., Crew]:
    """`crew(n)`: a job of n ranks, the same one for all tests of the module."""
    return nursery.lasting_crew


@pytest.fixture
def committed() -> Callable[..., Any]:
    """`committed(obj, f, ...)`: fastckpt.save with these arguments, waited for; returns `f`."""

    def save(obj: Any, f: Any, *args: Any, **options: Any) -> Any:
        fastckpt.save(obj, f, *args, **gathered(**options)).result(timeout=240)
        return f

    return save


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be read, or was gone, is tried again without a pause."""
    monkeypatch.setattr("fastckpt.storage.file_system.REREAD_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr("fastckpt.storage.vanishing.LISTING_PAUSES_S", (0.0,) * 20)


@pytest.fixture(scope="session")
def real_disk(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Path]:
    """A directory for the session, not in memory where there is a choice: O_DIRECT needs a disk."""
    base = tmp_path_factory.getbasetemp()
    if file_system(base) not in MEMORY_FILE_SYSTEMS:
        yield base
        return
    here = Path(tempfile.mkdtemp(prefix=".pytest-disk-", dir=pytestconfig.rootpath))
    yield here
    shutil.rmtree(here)


@pytest.fixture
def disk(real_disk: Path) -> Iterator[Path]:
    """An empty directory on a real disk; no temporary may be left in it when the test is over.

    It is removed at once: checkpoints are too big to be kept for pytest's last three runs.
    """
    directory = Path(tempfile.mkdtemp(prefix="disk-", dir=real_disk))
    yield directory
    wait_for_saves()
    left = [path.name for path in directory.rglob(TEMPORARIES)]
    while directory.exists():
        with suppress(FileNotFoundError):  # a Checkpointer that is forgotten gives up its lease now
            shutil.rmtree(directory)
    assert not left


@pytest.fixture
def memory(disk: Path) -> Iterator[Path]:
    """A directory where syncs cost nothing, for what is done thousands of times."""
    if not os.access("/dev/shm", os.W_OK):
        yield disk
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)
        wait_for_saves()


def wait_for_saves() -> None:
    """Waits until no save of this process does anything more: a result is told before what was
    replaced is removed.
    """
    if pipeline._current is not None:
        pipeline._current.drain()


def descriptors_below(directory: Path) -> list[str]:
    """Targets of the open descriptors of this process that lie in `directory`."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(os.readlink(link))
        except FileNotFoundError:
            continue  # the descriptor that listed the directory
    return [target for target in targets if target.startswith(f"{directory}/")]


@pytest.fixture(autouse=True)
def only_torch_is_safe() -> None:
    """Frameworks register classes for torch.load as they are imported, Megatron-core among them: no
    other test is to feel that. Those that torch registers, for nested tensors, stay.
    """
    there = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(
        [each for each in there if getattr(each, "__module__", "").split(".")[0] == "torch"]
    )


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Tests give back the process's own pipeline, with a storage whose methods are its class's: in
    another test a change of the class would be without effect. They keep the lease of no directory.
    """
    yield
    give_up_leases()
    here = pipeline._current
    if here is not None:
        assert type(here.storage) is PathStorage, here.storage
        assert not [name for name in vars(here.storage) if hasattr(Storage, name)]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torture")
    group.addoption("--torture", type=float, metavar="SECONDS", help="run what is long or random")
    group.addoption("--each", action="store_true", help="this time is that of each test alone")
    group.addoption("--seed", type=int, default=SUITE_SEED, help="of all that is left to chance")
    group.addoption("--round", type=int, help="only this one of the rounds of a storm")


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what is in the background with interrupts ignored, and tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Threads of OpenMP spin while they wait for work, and workers share the cores.
    torch.set_num_threads(1)
    gc.disable()  # until all is imported
    is_torture = config.getoption("--torture") is not None
    Chance.torture_s = config.getoption("--torture")
    hypothesis.settings.register_profile(
        "fastckpt",
        derandomize=not is_torture,
        max_examples=Chance.examples(15),
        database=None,
        deadline=None,
    )
    hypothesis.settings.load_profile("fastckpt")
    random.seed(config.getoption("--seed"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves what is long or random to torture, and to torture nothing else, in any order."""
    is_torture = config.getoption("--torture") is not None

    def is_chosen(item: pytest.Item) -> bool:
        marked = item.get_closest_marker("torture") is not None
        if not is_torture:
            return not marked
        function = getattr(item, "function", None)
        random_too = "storm" in getattr(item, "fixturenames", ())
        return marked or random_too or hypothesis.is_hypothesis_test(function)

    left_out = [item for item in items if not is_chosen(item)]
    items[:] = [item for item in items if is_chosen(item)]
    config.hook.pytest_deselected(items=left_out)
    if is_torture:
        random.Random(config.getoption("--seed")).shuffle(items)


def pytest_collection_finish() -> None:
    """What was imported stays: a collection of garbage need not look at it, test after test."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEGUN] = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit_s = item.config.getoption("--torture")
    if limit_s is None:
        return
    if item.config.getoption("--each"):
        item.config.stash[BEGUN] = time.monotonic()
    if time.monotonic() - item.config.stash[BEGUN] > limit_s:
        pytest.skip("the time for torture is over")
    own = item.get_closest_marker("timeout")
    if own is not None and own.args[0] > max(limit_s, LONG_S):
        pytest.skip(f"it may take {own.args[0]} s: torture is to last as long")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')}"


@pytest.fixture
def storm(request: pytest.FixtureRequest) -> Storm:
    """Rounds of a test that is left to chance."""
    option = request.config.getoption
    limit_s = option("--torture")
    deadline = None if limit_s is None else request.config.stash[BEGUN] + limit_s
    return Storm(request.node.name, option("--seed"), deadline, option("--round"))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Leaves the name of the test for `make test`, which tells it if the interpreter dies."""
    if BUILD.is_dir():
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        (BUILD / f"running-test-{worker}").write_text(nodeid)


def pytest_unconfigure() -> None:
    """An interpreter that does not end says where it stands, and ends; a worker's waits until the
    last test of the others is over.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)


@pytest.fixture(scope="module", autouse=True)
def memory_goes_back() -> Iterator[None]:
    """After each module. The allocator keeps what threads have freed, gigabytes in the end, and
    programs that a worker starts are forked from it.
    """
    yield
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session", autouse=True)
def nothing_stays_behind(real_disk: Path) -> Iterator[None]:
    """After the last test no descriptor is open below the directory and no save is running."""
    yield
    deadline = time.monotonic() + 60
    while saving_threads() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not saving_threads()
    assert not descriptors_below(real_disk)


@pytest.fixture(scope="session")
def cufile_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cufile_stub.built(tmp_path_factory.mktemp("cufile"))


@pytest.fixture
def cufile(driver: CudaStub, runtime: Runtime, cufile_path: Path) -> Iterator[CufileStub]:
    """fastckpt's pipeline knows the device, and cuFile; nothing of either is alive afterwards."""
    driver.configure()
    runtime.driver = driver
    stub = CufileStub(cufile_path, driver.path)
    before = driver.alive(), driver.memory() if hasattr(driver, "memory") else None
    with accelerator.installed(runtime, driver.path, cufile=str(cufile_path)):
        yield stub
        driver.configure()
        runtime.reset()
    assert (driver.alive(), driver.memory() if hasattr(driver, "memory") else None) == before
    assert stub.alive().buffers == stub.alive().files == 0
