"""What a save with the step fence commits was the state at the call: whatever is still running when
the copy ends is waited for, and what torch does not count is looked for. Operations are held inside
their C code by memory that does not arrive. Must not know how a block moves.
"""

from __future__ import annotations

import ast
import ctypes
import dis
import os
import queue
import select
import selectors
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastckpt
from fastckpt.saving import mutation_check, thread_calls
from fastckpt.saving.thread_calls import (
    OWN_FILES,
    WAITING,
    ThreadCalls,
    ThreadPosition,
    _callee,
    positions,
)
from fastckpt.state import tree
from fastckpt.steps import load as step_load
from tests.kit.saves import (
    WAIT_S,
    HeldTensor,
    every_test_settles,
    functions_of,
    running,
    saving_threads,
    stands_in,
    wait_until,
)
from tests.kit.torches import dcp, needs_dcp
from tests.torture.step_fence import OPERATIONS, WAYS, tried

__all__ = ["every_test_settles"]

NBYTES = 2 << 20
# These wait, but not by names that are known to.
read_unnamed, poll_unnamed = ctypes.CDLL(None).read, ctypes.CDLL(None).poll


def as_file(state: Any, directory: Path) -> fastckpt.SaveHandle:
    return fastckpt.save(state, directory / "a.pt", options=fastckpt.SaveOptions(fence="step"))


def as_step(state: Any, directory: Path) -> fastckpt.SaveHandle:
    return fastckpt.Checkpointer(
        directory / "run", options=fastckpt.SaveOptions(fence="step")
    ).save(1, state)


def as_dcp(state: Any, directory: Path) -> Any:
    return dcp.async_save(
        state,
        checkpoint_id=str(directory / "dcp"),
        options=fastckpt.SaveOptions(fence="step"),
        no_dist=True,
    )


SAVES = [as_file, as_step, pytest.param(as_dcp, marks=needs_dcp)]


def waits_for_calls() -> bool:
    """Whether a save has copied everything, and is about to give its verdict."""
    threads = [thread for thread in threading.enumerate() if thread.name in saving_threads()]
    return any(stands_in(thread, "wait") and stands_in(thread, "give") for thread in threads)


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe, which is written to at the end so that nobody waits for ever."""
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.write(writing, b"end")
        os.close(writing)


def polled(fd: int) -> ctypes.Array[ctypes.c_char]:
    """What poll(2) takes to wait until a descriptor can be read."""
    return ctypes.create_string_buffer(struct.pack("ihh", fd, select.POLLIN, 0))


# Operations that are running when the copy ends.


@pytest.mark.parametrize("save", SAVES)
def test_an_operation_that_the_copy_overtakes_is_a_conflict(
    disk: Path, save: Callable[[Any, Path], Any]
) -> None:
    """torch counts the change when the operation ends, which is after everything was copied. (The
    values are the same, or samples of memory would tell.)
    """
    weight = torch.full((NBYTES // 4,), 3.0)
    with HeldTensor(NBYTES) as gate, HeldTensor(NBYTES) as source:
        handle = save({"gate": gate.tensor, "w": weight}, disk)
        gate.wait_reached()
        with running(lambda: weight.copy_(source.tensor)):
            source.wait_reached()
            assert weight._version == 0
            gate.release()
            wait_until(waits_for_calls, "everything is copied")
            assert not handle.is_staged() and not handle.done()
            source.release()
        assert isinstance(handle.exception(WAIT_S), fastckpt.StagingConflict)


def test_an_operation_of_the_training_thread_is_waited_for_though_it_harms_nothing(
    disk: Path,
) -> None:
    other = torch.ones(NBYTES // 4)
    with HeldTensor(NBYTES) as gate, HeldTensor(NBYTES) as source:
        handle = as_file({"gate": gate.tensor}, disk)
        gate.wait_reached()

        def let_go() -> None:
            source.wait_reached()
            gate.release()
            wait_until(waits_for_calls, "everything is copied")
            source.release()

        with running(let_go):
            other.copy_(source.tensor)
        handle.result(WAIT_S)


class Held(TorchDispatchMode):
    """What is done below it ends, and is counted, when `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.done, self.go = threading.Event(), threading.Event()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.done.set()
        assert self.go.wait(WAIT_S)
        return result


def test_an_operation_whose_kernel_is_in_python_has_not_ended_with_the_kernel(disk: Path) -> None:
    weight = torch.ones(NBYTES // 4)
    with HeldTensor(NBYTES) as gate, Held() as mode:
        mode.__exit__(None, None, None)
        handle = as_file({"gate": gate.tensor, "w": weight}, disk)
        gate.wait_reached()

        def change() -> None:
            with mode:
                weight.mul_(1)

        with running(change):
            assert mode.done.wait(WAIT_S) and weight._version == 0
            gate.release()
            wait_until(waits_for_calls, "everything is copied")
            mode.go.set()
        mode.__enter__()
    assert isinstance(handle.exception(WAIT_S), fastckpt.StagingConflict)


def test_a_call_that_does_not_end_fails_the_save_and_is_named(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutation_check, "_NOTICE_S", 0.0)
    monkeypatch.setattr(mutation_check, "PATIENCE_S", 1.0)
    with HeldTensor(NBYTES) as gate, pipe() as (reading, writing):
        handle = as_file({"gate": gate.tensor}, disk)
        gate.wait_reached()
        begun = threading.Event()

        def call() -> None:
            begun.set()
            poll_unnamed(polled(reading), 1, -1)

        with running(call) as thread:
            assert begun.wait(WAIT_S)
            wait_until(lambda: blocked_in(thread, "call"), "it is in the call")
            gate.release()
            error = handle.exception(WAIT_S)
            os.write(writing, b"x")
    assert isinstance(error, fastckpt.StagingConflict)
    assert f"thread {thread.name!r} at {__file__}:" in str(error) and "in call" in str(error)


def blocked_in(thread: threading.Thread, function: str) -> bool:
    """Whether a thread stands in this function itself, and sleeps there."""
    functions = functions_of(thread)
    state = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
    return functions[:1] == [function] and state[0] == "S"


def test_a_call_that_began_before_the_save_does_not_hold_it_up(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that waits in C, say: whatever it does, it did when the state was captured."""
    with pipe() as (reading, writing):

        def call() -> None:
            poll_unnamed(polled(reading), 1, -1)

        with running(call) as thread:
            wait_until(lambda: blocked_in(thread, "call"), "it is in the call")
            as_file({"w": torch.ones(NBYTES // 4)}, disk).result(WAIT_S)
            before = positions()
            assert ThreadCalls(before).wait(WAIT_S)
            # What is given up after a while must not have been before this looks.
            monkeypatch.setattr(thread_calls, "STAYED_S", WAIT_S)
            assert not ThreadCalls({}).wait(0)
            os.write(writing, b"x")


def compute() -> None:
    until_s = time.thread_time() + 0.05
    while time.thread_time() < until_s:
        pass


def test_a_server_that_waits_for_its_next_message_does_not_hold_the_save_up(disk: Path) -> None:
    """It has had one since the save began, and so has not stayed in one call."""
    with HeldTensor(NBYTES) as gate, pipe() as (reading, writing):
        answered = threading.Event()

        def serve() -> None:
            read_unnamed(reading, ctypes.create_string_buffer(1), 1)
            compute()
            answered.set()
            read_unnamed(reading, ctypes.create_string_buffer(1), 1)

        with running(serve) as thread:
            wait_until(lambda: blocked_in(thread, "serve"), "it waits for a message")
            handle = as_file({"gate": gate.tensor}, disk)
            gate.wait_reached()
            os.write(writing, b"x")
            assert answered.wait(WAIT_S)
            wait_until(lambda: blocked_in(thread, "serve"), "it waits for the next one")
            gate.release()
            handle.result(WAIT_S)
            os.write(writing, b"x")


def test_a_loop_that_has_come_to_a_tensor_of_the_state_is_waited_for(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands where it stood at the call, at another tensor; what it has computed tells."""
    monkeypatch.setattr(thread_calls, "STAYED_S", 0.0)
    weight, other = (torch.full((NBYTES // 4,), 3.0) for _ in range(2))
    with HeldTensor(NBYTES) as gate, HeldTensor(NBYTES) as first, HeldTensor(NBYTES) as second:

        def loop() -> None:
            for tensor, source in ((other, first.tensor), (weight, second.tensor)):
                tensor.copy_(source)
                compute()

        with running(loop):
            first.wait_reached()
            handle = as_file({"gate": gate.tensor, "w": weight}, disk)
            gate.wait_reached()
            first.release()
            second.wait_reached()
            gate.release()
            wait_until(waits_for_calls, "everything is copied")
            second.release()
        assert isinstance(handle.exception(WAIT_S), fastckpt.StagingConflict)


def test_who_has_used_the_processor_since_has_not_stayed() -> None:
    before = ThreadPosition((1, 2, 3), 5.0, 100.0)
    assert ThreadPosition((1, 2, 3), 5.0001, 100.1).has_stayed(before)
    assert ThreadPosition((1, 2, 3), 5.01, 200.0).has_stayed(before), "it looks up at times"
    assert not ThreadPosition((1, 2, 3), 5.01, 100.1).has_stayed(before)
    assert not ThreadPosition((1, 2, 4), 5.0, 100.1).has_stayed(before)
    assert ThreadPosition((1, 2, 3), None, 100.1).has_stayed(before), "it cannot be told"


# Memory that is saved, whatever the tensor is that had it.


def set_to_another(weight: torch.Tensor) -> None:
    weight.set_(torch.empty(1))


def give_other_data(weight: torch.Tensor) -> None:
    weight.data = torch.empty(0)


def swap_with_another(weight: torch.Tensor) -> None:
    torch.utils.swap_tensors(weight, torch.ones(3))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("lose", [set_to_another, give_other_data, swap_with_another])
def test_a_change_is_seen_though_the_tensor_has_other_memory_then(
    disk: Path, save: Callable[[Any, Path], Any], lose: Callable[[torch.Tensor], None]
) -> None:
    weight = torch.ones(40_000)
    with HeldTensor(NBYTES) as gate:
        handle = save({"gate": gate.tensor, "w": weight}, disk)
        gate.wait_reached()
        weight[100:300].add_(1)
        lose(weight)
        gate.release()
    with pytest.raises(fastckpt.StagingConflict, match="changed in place"):
        handle.result(WAIT_S)


@pytest.mark.parametrize("whole", [torch.Tensor.untyped_storage, torch.Tensor.storage])
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_storage_that_is_saved_as_such_has_the_values_of_the_call(
    disk: Path, whole: Callable[[torch.Tensor], Any]
) -> None:
    weight = torch.ones(40_000)
    with HeldTensor(NBYTES) as gate:
        handle = as_file({"gate": gate.tensor, "w": whole(weight)}, disk)
        gate.wait_reached()
        weight.add_(1)
        gate.release()
    handle.result(WAIT_S)
    loaded = torch.load(disk / "a.pt", weights_only=False)["w"]
    assert bytes(loaded.untyped()) == bytes(torch.ones(40_000).untyped_storage())


@pytest.mark.parametrize("save", SAVES)
def test_buffers_may_change_however_many_there_are(
    disk: Path, save: Callable[[Any, Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small tensors are written into shards by all ranks rather than as objects by one."""
    monkeypatch.setattr(tree, "SMALL_SUM_BYTES_MAX", 0)
    buffers = [torch.ones(1000) for _ in range(3)]
    with HeldTensor(NBYTES) as gate:
        handle = save({"gate": gate.tensor, "b": buffers}, disk)
        gate.wait_reached()
        for buffer in buffers:
            buffer.add_(1)
        gate.release()
    handle.result(WAIT_S)
    if save is as_step:
        with fastckpt.Checkpointer(disk / "run") as checkpointer:
            assert all(bool((found == 1).all()) for found in checkpointer.load()["b"])


# Who waits runs no operation.


def waits() -> dict[str, Callable[[ExitStack], tuple[Callable[[], object], Callable[[], object]]]]:
    """Name -> (what waits, what ends it), made within a context."""

    def lock(_stack: ExitStack) -> Any:
        held = threading.Lock()
        held.acquire()
        return held.acquire, held.release

    def with_lock(_stack: ExitStack) -> Any:
        held = threading.Lock()
        held.acquire()

        def wait() -> None:
            with held:
                pass

        return wait, held.release

    def event(_stack: ExitStack) -> Any:
        made = threading.Event()
        return lambda: made.wait(WAIT_S), made.set

    def simple_queue(_stack: ExitStack) -> Any:
        made: Any = queue.SimpleQueue()
        return lambda: made.get(timeout=WAIT_S), lambda: made.put(0)

    def plain_queue(_stack: ExitStack) -> Any:
        made: Any = queue.Queue()
        return lambda: made.get(timeout=WAIT_S), lambda: made.put(0)

    def selector(stack: ExitStack) -> Any:
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        stack.callback(os.close, writing)
        made = selectors.DefaultSelector()
        made.register(reading, selectors.EVENT_READ)
        return lambda: made.select(WAIT_S), lambda: os.write(writing, b"x")

    def receive(stack: ExitStack) -> Any:
        ours, theirs = socket.socketpair()
        stack.enter_context(ours)
        stack.enter_context(theirs)
        return lambda: ours.recv(1), lambda: theirs.send(b"x")

    def process(stack: ExitStack) -> Any:
        made = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        assert made.stdin is not None
        stack.callback(made.wait)
        return made.wait, made.stdin.close

    return {
        "lock": lock,
        "with lock": with_lock,
        "event": event,
        "simple queue": simple_queue,
        "queue": plain_queue,
        "selector": selector,
        "socket": receive,
        "process": process,
    }


@pytest.mark.parametrize("case", waits())
def test_a_thread_that_waits_is_in_no_operation(case: str) -> None:
    with ExitStack() as stack:
        wait, end = waits()[case](stack)

        def call() -> None:
            wait()

        with running(call) as thread:
            wait_until(
                lambda: stands_in(thread, "call") and thread.ident not in ThreadCalls({})._pending,
                "it waits",
            )
            end()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("sleep(1)", "sleep"),
        ("lock.acquire(timeout=2, blocking=True)", "acquire"),
        ("a.b.get(*c, d, **e)", "get"),
        ("f(g(1), h(2)).wait(k(3), [4, 5])", "wait"),
        ("self[0].join(f'{a}', x[1:2], not b)", "join"),
        ("(sleep if a else f)(1)", None),
        ("recv[0](sleep)", None),
        ("operations.get(a)(sleep)", None),
        ("(lambda: sleep)(1)", None),
    ],
)
def test_the_name_of_what_a_call_calls(call: str, name: str | None) -> None:
    code = compile(call, "a test", "eval")
    calls = [its for its in dis.get_instructions(code) if its.opname.startswith("CALL")]
    found = _callee(code, calls[-1].offset)
    assert found == name or (name is None and found not in WAITING)


def test_no_operation_that_writes_has_the_name_of_a_wait() -> None:
    def writes(schema: Any) -> bool:
        return any(
            its.alias_info is not None and its.alias_info.is_write and "Tensor" in its.type.str()
            for its in schema.arguments
        )

    named = {its.name.split("::")[1] for its in torch._C._jit_get_all_schemas() if writes(its)}
    assert len(named) > 500 and not named & WAITING


def test_no_module_that_is_taken_to_wait_changes_a_tensor() -> None:
    for path in map(Path, OWN_FILES):
        calls = [its for its in ast.walk(ast.parse(path.read_text())) if isinstance(its, ast.Call)]
        names = {its.func.attr for its in calls if isinstance(its.func, ast.Attribute)}
        assert not {name for name in names if name.strip("_") + "_" == name}, path


def test_a_loop_of_the_main_thread_that_is_always_met_in_one_call_moves_on() -> None:
    ended: list[bool] = []
    nap = time.sleep  # by a name that is not known to wait
    main = threading.main_thread().ident
    others = {ident: where for ident, where in positions().items() if ident != main}

    def ask() -> None:
        try:
            ended.append(ThreadCalls(others).wait(WAIT_S))
        finally:
            ended.append(False)

    with running(ask):
        while not ended:
            nap(0.001)
    assert ended[0]


# What torch does not count.


def fused_sgd(weight: torch.Tensor) -> None:
    options: dict[str, Any] = {"momentum": 0.9, "lr": 0.1, "weight_decay": 0.0, "dampening": 0.0}
    options |= {"nesterov": False, "maximize": False, "is_first_step": False}
    torch._fused_sgd_([weight], [torch.ones_like(weight)], [torch.ones_like(weight)], **options)


UNCOUNTED: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda weight: weight.data.add_(1),
    "numpy": lambda weight: weight.numpy().__iadd__(1),
    "storage": lambda weight: weight.untyped_storage().fill_(1),
    "dlpack": lambda weight: torch.from_dlpack(weight).add_(1),
    "map_": lambda weight: weight.map_(weight, lambda a, _b: a + 1),
    "fused": fused_sgd,
    "batch_norm": lambda weight: torch.nn.functional.batch_norm(
        torch.randn(2, len(weight)), weight, torch.ones_like(weight), training=True
    ),
}


class Named(torch.Tensor):
    """A subclass with memory of its own, as libraries make them."""


def transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(100, 200).t()


def strided(weight: torch.Tensor) -> torch.Tensor:
    return weight[::2]


def of_a_subclass(weight: torch.Tensor) -> torch.Tensor:
    return weight.as_subclass(Named)


@pytest.mark.parametrize("view", [transposed, strided, of_a_subclass])
def test_samples_are_of_tensors_of_any_shape(
    disk: Path, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    weight = torch.ones(20_000)
    with HeldTensor(NBYTES) as gate:
        handle = as_file({"gate": gate.tensor, "w": view(weight)}, disk)
        gate.wait_reached()
        weight.data.add_(1)
        gate.release()
    with pytest.raises(fastckpt.StagingConflict, match=r"or that torch does not count\) before"):
        handle.result(WAIT_S)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("write", UNCOUNTED)
def test_a_write_that_torch_does_not_count_is_seen_in_memory(
    disk: Path, write: str, save: Callable[[Any, Path], Any]
) -> None:
    weight = torch.ones(20_000)
    with HeldTensor(NBYTES) as gate:
        handle = save({"gate": gate.tensor, "w": weight}, disk)
        gate.wait_reached()
        UNCOUNTED[write](weight)
        assert weight._version == 0
        gate.release()
    with pytest.raises(fastckpt.StagingConflict, match=r"'w'.*that torch does not count"):
        handle.result(WAIT_S)


def test_a_restore_is_counted_before_its_first_byte(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes past torch, in many calls, and a save may be copying what it writes to."""
    weight, seen = torch.ones(NBYTES // 4), []
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        checkpointer.save(1, {"w": weight}).result(WAIT_S)
        planned = step_load.copies

        def noted(*args: Any) -> Any:
            seen.append(weight._version)
            return planned(*args)

        monkeypatch.setattr(step_load, "copies", noted)
        assert checkpointer.restore({"w": weight}) == 1
    assert seen == [1]


def test_memory_that_was_freed_by_resizing_is_not_looked_at(disk: Path) -> None:
    weight = torch.ones(20_000)
    watched = mutation_check.WatchedTensors([(weight, weight._version)], {"w": weight})
    weight.untyped_storage().resize_(0)
    watched.look()
    watched.check("a")


@pytest.mark.torture
@pytest.mark.parametrize("mib", [16, 256])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_an_operation_races_with_is_refused_or_right(
    disk: Path, operation: str, way: str, mib: int
) -> None:
    found = tried(way, operation, mib << 20, 10, str(disk))
    assert not found["torn"] and not found["new"], found
