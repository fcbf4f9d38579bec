"""What a caller may rely on while a save is in flight: the handle and its clocks, both fences, the
order of saves, the staging budget, and that nothing accumulates. Uses the public API only; staging
is stopped where a test needs it by memory that does not arrive. Must not know how a block moves.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import io
import itertools
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt.arguments.quantities import shown_size
from fastckpt.latch import SignalSafeFuture, items_of
from tests.kit.programs import run_python
from tests.kit.saves import (
    WAIT_S,
    HeldTensor,
    Octets,
    every_test_settles,
    running,
    stands_in,
    temporaries,
    wait_until,
)
from tests.kit.steps import held_up

__all__ = ["every_test_settles"]  # a fixture

BLOCK = 8 << 20
TOO_LONG = "n" * 256  # of a file: which is found out behind save()


def filled(value: float, nbytes: int = 1 << 20) -> dict[str, torch.Tensor]:
    return {"w": torch.full((nbytes // 4,), float(value))}


def value_of(path: Path) -> float:
    """The one value that the tensor in a checkpoint of filled() has."""
    w = fastckpt.load(path)["w"]
    assert bool((w == w[0]).all()), "old and new values mixed"
    return float(w[0].detach())


# The handle.


def test_handle_is_a_future(disk: Path) -> None:
    with HeldTensor() as held:
        handle = fastckpt.save(
            {"w": held.tensor}, disk / "a.pt", options=fastckpt.SaveOptions(fence="step")
        )
        called: list[Any] = []
        handle.add_done_callback(called.append)
        assert isinstance(handle, concurrent.futures.Future)
        assert handle.running() and not handle.done() and not handle.cancelled()
        assert called == []
        with pytest.raises(TimeoutError):
            handle.result(timeout=0)
        with pytest.raises(TimeoutError):
            handle.exception(timeout=0)
        held.release()
    finished = next(concurrent.futures.as_completed([handle], timeout=WAIT_S))
    assert finished is handle and handle.done() and not handle.running()
    assert handle.result() is handle.stats and handle.exception() is None
    wait_until(lambda: called == [handle], "the callback was called")
    assert handle.path == os.path.realpath(disk / "a.pt")


def test_a_handle_that_is_done_is_waited_for_with_one_that_is_not(disk: Path) -> None:
    """It is not counted twice: wait() would return early, and as_completed() raise KeyError."""
    done, pending = SignalSafeFuture[int](), SignalSafeFuture[int]()
    done.set_result(1)
    in_order = concurrent.futures.as_completed([done, pending], WAIT_S)
    assert next(in_order) is done

    def end() -> None:
        wait_until(lambda: len(pending._waiters) == 2, "both wait")
        pending.set_result(2)

    with concurrent.futures.ThreadPoolExecutor() as other:
        ended = other.submit(end)
        assert concurrent.futures.wait([done, pending], WAIT_S).not_done == set()
        ended.result()
    assert [*in_order] == [pending]


def test_handle_can_be_awaited(disk: Path) -> None:
    async def save() -> fastckpt.SaveStats:
        return await asyncio.wrap_future(fastckpt.save(filled(1), disk / "a.pt"))

    stats = asyncio.run(asyncio.wait_for(save(), WAIT_S))
    assert stats.committed_s is not None and value_of(disk / "a.pt") == 1


@pytest.mark.parametrize("fence", ["call", "step"])
@pytest.mark.parametrize("durable", [True, False])
def test_clocks_are_ordered(disk: Path, fence: str, durable: bool) -> None:
    begin = time.perf_counter()
    stats = fastckpt.save(
        filled(1, 20 << 20),
        disk / "a.pt",
        options=fastckpt.SaveOptions(fence=fence, durable=durable),
    ).result(WAIT_S)
    elapsed = time.perf_counter() - begin
    clocks = (0.0, stats.staged_s, stats.written_s, stats.committed_s, elapsed)
    assert None not in clocks and list(clocks) == sorted(clocks)  # type: ignore[type-var]
    assert stats.stall_s is not None and 0 < stats.stall_s < elapsed
    if fence == "call":
        assert stats.stall_s >= (stats.staged_s or 0)
    assert stats.nbytes == (disk / "a.pt").stat().st_size
    assert stats.backend in ("io_uring", "threads") and stats.why


def test_clocks_of_a_failed_save_stop_where_it_failed(disk: Path) -> None:
    handle = fastckpt.save(filled(1), disk / TOO_LONG)
    assert isinstance(handle.exception(WAIT_S), fastckpt.StorageError)
    assert handle.stats.committed_s is None and handle.stats.written_s is None
    handle.wait_staged(timeout=0)  # a save that failed reads nothing any more


def test_a_wait_that_timed_out_has_not_asked_for_the_error(disk: Path) -> None:
    with HeldTensor() as held:
        state = {"w": held.tensor}
        handle = fastckpt.save(state, disk / "a.pt", options=fastckpt.SaveOptions(fence="step"))
        held.wait_reached()
        held.tensor[0] = 0
        with pytest.raises(TimeoutError):
            handle.result(timeout=0)
    concurrent.futures.wait([handle], WAIT_S)
    with pytest.raises(fastckpt.StagingConflict):
        fastckpt.save(filled(1), disk / "a.pt")
    fastckpt.save(filled(2), disk / "a.pt").result(WAIT_S)
    assert value_of(disk / "a.pt") == 2


@pytest.mark.parametrize("is_done", [False, True])
def test_a_callback_that_asks_is_not_the_caller(disk: Path, is_done: bool) -> None:
    """Nobody hears what it returns or raises, so the next save raises the error all the same."""
    heard, has_asked = list[object](), threading.Event()

    def alert(handle: fastckpt.SaveHandle) -> None:
        heard.append(handle.exception())
        has_asked.set()
        handle.result()

    handle = fastckpt.save(filled(1), disk / TOO_LONG)
    if is_done:
        concurrent.futures.wait([handle], WAIT_S)
    handle.add_done_callback(alert)
    assert has_asked.wait(WAIT_S) and isinstance(heard[0], fastckpt.StorageError)
    with pytest.raises(fastckpt.StorageError, match=r"an earlier save, to .* failed"):
        fastckpt.save(filled(2), disk / "a.pt")
    fastckpt.save(filled(3), disk / "a.pt").result(WAIT_S)


# The call fence.

SIZES = [4, 1000, 3 << 20, BLOCK, BLOCK + 4 * 1021]


def test_call_fence_saves_the_values_of_the_call(disk: Path) -> None:
    tensors = [torch.empty(nbytes // 4) for nbytes in SIZES]
    handles: dict[int, fastckpt.SaveHandle] = {}
    turns = 16
    for turn in range(turns):
        for tensor in tensors:
            tensor.fill_(turn)
        path = disk / f"{turn % 4}.pt"
        handles[turn] = fastckpt.save(tensors, path, options=fastckpt.SaveOptions(durable=False))
        for tensor in tensors:
            tensor.fill_(-1)
        # Half of the turns let the next saves overlap this one's writing.
        if turn % 2:
            handles[turn].result(WAIT_S)
            for tensor in fastckpt.load(path):
                assert bool((tensor == turn).all()), f"save {turn} holds a later value"
    for handle in handles.values():
        handle.result(WAIT_S)
    for last in range(turns - 4, turns):
        loaded = fastckpt.load(disk / f"{last % 4}.pt")
        assert [tensor.numel() for tensor in loaded] == [tensor.numel() for tensor in tensors]
        assert all(bool((tensor == last).all()) for tensor in loaded)


def test_call_fence_returns_only_when_everything_was_copied(disk: Path) -> None:
    returned = threading.Event()
    with HeldTensor() as held:

        def save() -> None:
            fastckpt.save({"w": held.tensor}, disk / "a.pt").result(WAIT_S)

        def call() -> None:
            handle = fastckpt.save({"w": held.tensor}, disk / "b.pt")
            returned.set()
            held.tensor.fill_(-1)
            handle.result(WAIT_S)

        with running(call) as thread:
            held.wait_reached()
            wait_until(lambda: stands_in(thread, "pass_fence"), "save() waits")
            assert not returned.is_set()
            held.release()
    assert value_of(disk / "b.pt") == 3


# The step fence.


def parameters(count: int, nbytes: int, value: float) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.full((nbytes // 4,), value)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def test_step_fence_returns_at_once_and_the_optimizer_waits(disk: Path) -> None:
    (weight,) = parameters(1, 1 << 20, 5.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    stepped = threading.Event()
    with HeldTensor() as held:
        handle = fastckpt.save(
            {"held": held.tensor, "w": weight},
            disk / "a.pt",
            options=fastckpt.SaveOptions(fence="step"),
        )
        held.wait_reached()
        assert handle.stats.staged_s is None and not handle.done()
        with pytest.raises(TimeoutError):
            handle.wait_staged(timeout=0)
        returned_s = handle.stats.stall_s

        def step() -> None:
            optimizer.step()
            stepped.set()

        with running(step) as thread:
            wait_until(lambda: stands_in(thread, "pass_fence"), "the optimizer waits")
            assert not stepped.is_set() and bool((weight == 5).all())
            held.release()
    stats = handle.result(WAIT_S)
    assert bool((weight == 4).all()), "the step was lost"
    loaded = fastckpt.load(disk / "a.pt")
    assert bool((loaded["w"] == 5).all()) and bool((loaded["held"] == 3).all())
    assert returned_s is not None and stats.stall_s is not None
    assert stats.stall_s > returned_s, "the optimizer's wait is not in stall_s"
    assert not temporaries(disk)


def test_step_fence_of_a_state_larger_than_its_staging(disk: Path) -> None:
    weights = parameters(4, BLOCK, 0.0)
    optimizers = [torch.optim.SGD(weights[:2], lr=1.0), torch.optim.AdamW(weights[2:], lr=1.0)]
    for turn in range(3):
        before = [weight.detach().clone() for weight in weights]
        state = {"w": weights, "optimizers": [each.state_dict() for each in optimizers]}
        path = disk / f"{turn}.pt"
        handle = fastckpt.save(
            state, path, options=fastckpt.SaveOptions(fence="step", staging_bytes=BLOCK)
        )
        for optimizer in optimizers:
            optimizer.step()
        assert handle.stats.staged_s is not None, "a step was taken before staging had ended"
        handle.result(WAIT_S)
        loaded = fastckpt.load(path)
        assert all(map(torch.equal, loaded["w"], before)), f"values of a later step, turn {turn}"
        path.unlink()


def test_step_fence_asks_nothing_of_an_optimizer_once_staged(disk: Path) -> None:
    (weight,) = parameters(1, 1 << 12, 5.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = fastckpt.save({"w": weight}, disk / "a.pt", options=fastckpt.SaveOptions(fence="step"))
    handle.wait_staged(WAIT_S)
    with torch.no_grad():
        weight.add_(1)  # allowed: it was copied
    optimizer.step()
    handle.result(WAIT_S)
    assert value_of(disk / "a.pt") == 5


class Holder:
    """An object as users have them: a state in attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__ |= attributes


def conflict_cases() -> dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]]:
    """Name -> (state from a tensor, the tensor to change, how the message calls it)."""

    def module(_tensor: torch.Tensor) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(20_000), torch.nn.Linear(4, 20_000))

    return {
        "dict": (lambda t: {"model": {"b": t}}, lambda s: s["model"]["b"], "model/b"),
        "list": (lambda t: [0, [t]], lambda s: s[1][0], "1/0"),
        "tuple": (lambda t: {"m": (1, t)}, lambda s: s["m"][1], "m/1"),
        "view": (lambda t: {"v": t[2:]}, lambda s: s["v"], "v"),
        "attribute": (lambda t: Holder(a=t), lambda s: s.a, "a"),
        "parameter": (lambda t: {"net": module(t)}, lambda s: s["net"][1].weight, "net/1.weight"),
        "buffer": (
            lambda t: {"net": module(t)},
            lambda s: s["net"][0].running_mean,
            "net/0.running_mean",
        ),
        "state_dict": (
            lambda t: {"net": module(t).state_dict()},
            lambda s: s["net"]["1.bias"],
            "net/1.bias",
        ),
    }


@pytest.mark.parametrize("case", conflict_cases())
def test_change_before_staging_is_a_conflict_that_names_the_tensor(disk: Path, case: str) -> None:
    make, pick, name = conflict_cases()[case]
    path = disk / "a.pt"
    fastckpt.save(filled(1), path).result(WAIT_S)
    with HeldTensor() as held:
        state = make(torch.zeros(20_000))  # above what is copied at the call
        handle = fastckpt.save(
            [held.tensor, state], path, options=fastckpt.SaveOptions(fence="step")
        )
        held.wait_reached()
        with torch.no_grad():
            pick(state).add_(1)
        held.release()
    with pytest.raises(fastckpt.StagingConflict) as caught:
        handle.result(WAIT_S)
    assert f"tensor '1/{name}' " in str(caught.value)
    assert isinstance(caught.value, fastckpt.CheckpointError)
    assert value_of(path) == 1, "the checkpoint before it is gone"
    assert not temporaries(disk)
    fastckpt.save(filled(2), path).result(WAIT_S)
    assert value_of(path) == 2


def test_small_tensors_may_change_at_once(disk: Path) -> None:
    """A forward pass updates BatchNorm's buffers long before the optimizer steps."""
    net = torch.nn.BatchNorm1d(4)
    with HeldTensor() as held:
        state = {"held": held.tensor, "net": net.state_dict()}
        handle = fastckpt.save(state, disk / "a.pt", options=fastckpt.SaveOptions(fence="step"))
        held.wait_reached()
        net(torch.ones(3, 4))
        held.release()
    handle.result(WAIT_S)
    assert int(fastckpt.load(disk / "a.pt")["net"]["num_batches_tracked"]) == 0
    assert int(net.num_batches_tracked) == 1


def test_conflict_is_found_through_an_alias_and_across_state_dict(disk: Path) -> None:
    net = torch.nn.Linear(200, 200)
    with HeldTensor() as held:
        state = {"held": held.tensor, "net": net.state_dict()}
        handle = fastckpt.save(state, disk / "a.pt", options=fastckpt.SaveOptions(fence="step"))
        held.wait_reached()
        with torch.no_grad():
            net.weight[0].zero_()  # neither this view nor the parameter itself was handed to save
        held.release()
    with pytest.raises(fastckpt.StagingConflict, match=r"weight.* save to '.*a.pt' had"):
        handle.result(WAIT_S)
    assert "not committed" not in str(handle.exception()), "what tells it at exit says so"


# Several saves.


def test_saves_to_several_paths_are_in_flight_together(disk: Path) -> None:
    with HeldTensor() as held:
        handles = [
            fastckpt.save(
                {"held": held.tensor, "w": torch.full((1000,), float(i))},
                disk / f"{i}.pt",
                options=fastckpt.SaveOptions(fence="step"),
            )
            for i in range(10)
        ]
        assert not any(handle.done() for handle in handles)
        held.release()
    for i, handle in enumerate(handles):
        handle.result(WAIT_S)
        loaded = fastckpt.load(disk / f"{i}.pt")
        assert bool((loaded["w"] == i).all()) and bool((loaded["held"] == 3).all())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: one stager, which is held")
def test_saves_to_one_path_commit_in_order_when_the_first_is_slow(disk: Path) -> None:
    path = disk / "a.pt"
    with HeldTensor() as held:
        slow = fastckpt.save({"w": held.tensor}, path, options=fastckpt.SaveOptions(fence="step"))
        held.wait_reached()
        fast = fastckpt.save(filled(9), path, options=fastckpt.SaveOptions(fence="step"))
        fast.wait_staged(WAIT_S)
        wait_until(lambda: fast.stats.written_s is not None, "the second save is written")
        assert not slow.done() and not fast.done() and not path.exists()
        held.release()
    assert (slow.result(WAIT_S).committed_s or 0) > 0
    fast.result(WAIT_S)
    assert value_of(path) == 9, "the save that was called last must win"
    assert not temporaries(disk)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: one stager, which is held")
def test_a_save_that_fails_early_lets_none_after_it_overtake_one_before(disk: Path) -> None:
    path = disk / "a.pt"
    with HeldTensor() as held, HeldTensor() as other:
        slow = fastckpt.save({"w": held.tensor}, path, options=fastckpt.SaveOptions(fence="step"))
        held.wait_reached()
        failing = fastckpt.save(
            {"w": other.tensor}, path, options=fastckpt.SaveOptions(fence="step")
        )
        other.wait_reached()
        last = fastckpt.save(filled(9), path, options=fastckpt.SaveOptions(fence="step"))
        other.tensor[0] = 0
        other.release()
        assert isinstance(failing.exception(WAIT_S), fastckpt.StagingConflict)
        with pytest.raises(TimeoutError):
            last.result(0.3)
        held.release()
    slow.result(WAIT_S)
    last.result(WAIT_S)
    assert value_of(path) == 9


def test_failed_save_leaves_what_the_one_before_it_to_the_same_path_wrote(disk: Path) -> None:
    path = disk / "a.pt"
    with HeldTensor() as held:
        first = fastckpt.save(filled(6), path, options=fastckpt.SaveOptions(fence="step"))
        failing = fastckpt.save(
            {"w": held.tensor}, path, options=fastckpt.SaveOptions(fence="step")
        )
        held.wait_reached()
        held.tensor[0] = 0
        held.release()
    first.result(WAIT_S)
    with pytest.raises(fastckpt.StagingConflict):
        failing.result(WAIT_S)
    assert value_of(path) == 6


def test_load_waits_for_the_save_in_flight_to_its_path(disk: Path) -> None:
    path, other, link = disk / "a.pt", disk / "b.pt", disk / "link.pt"
    fastckpt.save(filled(1), path).result(WAIT_S)
    fastckpt.save(filled(2), other).result(WAIT_S)
    link.symlink_to(path)
    for name in (path, link):
        with HeldTensor() as held:
            loaded: list[float] = []
            handle = fastckpt.save(
                {"w": held.tensor}, path, options=fastckpt.SaveOptions(fence="step")
            )
            held.wait_reached()
            with running(lambda n=name, out=loaded: out.append(value_of(n))) as thread:
                wait_until(lambda t=thread: stands_in(t, "wait_done"), "the load waits")
                assert value_of(other) == 2, "a load of another path must not wait"
                assert loaded == []
                held.release()
        assert loaded == [3.0]
        handle.result(WAIT_S)
        fastckpt.save(filled(1), path).result(WAIT_S)


def test_load_after_a_failed_save_in_flight_returns_the_old_object(disk: Path) -> None:
    path = disk / "a.pt"
    fastckpt.save(filled(1), path).result(WAIT_S)
    with HeldTensor() as held:
        handle = fastckpt.save({"w": held.tensor}, path, options=fastckpt.SaveOptions(fence="step"))
        held.wait_reached()
        held.tensor[0] = 0
        held.release()
    assert value_of(path) == 1
    with pytest.raises(fastckpt.StagingConflict):
        handle.result(WAIT_S)


def test_many_threads_save_at_once(disk: Path) -> None:
    shared = disk / "shared.pt"

    def save(number: int) -> None:
        w = torch.empty(200_000)
        for turn in range(8):
            w.fill_(100 * number + turn)
            own = disk / f"{number}-{turn % 3}.pt"
            handles = [
                fastckpt.save({"w": w}, path, options=fastckpt.SaveOptions(durable=False))
                for path in (own, shared)
            ]
            w.fill_(-1)
            if turn % 4 == 0:
                assert value_of(own) == 100 * number + turn
                assert value_of(shared) >= 0
            for handle in handles if turn % 2 else handles[:1]:
                handle.result(WAIT_S)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(save, range(8)))
    last = fastckpt.save(filled(-2), shared)
    last.result(WAIT_S)
    assert value_of(shared) == -2
    for number, slot in itertools.product(range(8), range(3)):
        turn = max(turn for turn in range(8) if turn % 3 == slot)
        assert value_of(disk / f"{number}-{slot}.pt") == 100 * number + turn
    assert not temporaries(disk)


SAVES_IN_CALLBACKS = """
import sys, threading
import torch, fastckpt
from tests.kit.saves import HeldTensor

folder, count = sys.argv[1], int(sys.argv[2])
copies = []
done = threading.Event()

def copy(handle):
    copies.append(fastckpt.save({"w": torch.ones(9)}, handle.path + ".copy"))
    if len(copies) == count:
        done.set()

with HeldTensor() as held:
    state = {"w": held.tensor}
    for i in range(count):
        fastckpt.save(
            state, f"{folder}/{i}.pt", options=fastckpt.SaveOptions(fence="step")
        ).add_done_callback(copy)
assert done.wait(60), f"only {len(copies)} of {count} callbacks could save"
for handle in copies:
    handle.result(60)
"""


@pytest.mark.multiprocess
def test_done_callbacks_may_save(disk: Path) -> None:
    count = 16
    run_python(SAVES_IN_CALLBACKS, disk, count)
    assert len(list(disk.glob("*.copy"))) == count


def test_sys_exit_in_a_callback_is_logged_and_the_next_one_is_called(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless it runs on the main thread, where it ends the program."""
    called = list[str]()

    def exits(_handle: fastckpt.SaveHandle) -> None:
        called.append("exits")
        sys.exit("enough")

    with HeldTensor() as held:
        handle = fastckpt.save(
            {"w": held.tensor}, disk / "a.pt", options=fastckpt.SaveOptions(fence="step")
        )
        handle.add_done_callback(exits)
        handle.add_done_callback(lambda _handle: called.append("next"))
        held.release()
        handle.result(WAIT_S)
    wait_until(lambda: called == ["exits", "next"], "both were called")
    assert "called sys.exit(), which does not end the program" in caplog.text
    with pytest.raises(SystemExit, match="enough"):
        handle.add_done_callback(exits)


# Memory.


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("fence", ["call", "step"])
def test_staging_budget_is_obeyed(disk: Path, blocks: int, fence: str) -> None:
    state = [torch.arange(5 * BLOCK // 8 + i) for i in range(2)]
    budget = blocks * BLOCK + 4096
    stats = fastckpt.save(
        state, disk / "a.pt", options=fastckpt.SaveOptions(fence=fence, staging_bytes=budget)
    ).result(WAIT_S)
    assert stats.nbytes > 9 * BLOCK and stats.staged_bytes_max > 0
    if blocks > 1:
        assert stats.staged_bytes_max <= budget
    assert all(map(torch.equal, fastckpt.load(disk / "a.pt"), state))


def test_staging_below_one_block_gets_one_block(disk: Path) -> None:
    state = torch.arange(2 * BLOCK // 8)
    fastckpt.save(state, disk / "a.pt", options=fastckpt.SaveOptions(staging_bytes=1)).result(
        WAIT_S
    )
    assert torch.equal(fastckpt.load(disk / "a.pt"), state)


BUDGET_VARIABLE = """
import os, sys
import torch, fastckpt
for value in ("lots", "0", "-1", "1GB/s", "", "8388607"):
    os.environ["FASTCKPT_STAGING_BYTES"] = value
    try:
        fastckpt.save(torch.ones(9), sys.argv[1]).result(60)
    except ValueError as error:
        assert "FASTCKPT_STAGING_BYTES" in str(error) and repr(value) in str(error), error
    else:
        sys.exit(f"{value!r} was accepted")
assert os.listdir(os.path.dirname(sys.argv[1])) == []
os.environ["FASTCKPT_STAGING_BYTES"] = "8388608"
fastckpt.save(torch.ones(9), sys.argv[1]).result(60)
"""


@pytest.mark.multiprocess
def test_budget_variable_is_validated(disk: Path) -> None:
    run_python(BUDGET_VARIABLE, disk / "a.pt")
    assert torch.equal(fastckpt.load(disk / "a.pt"), torch.ones(9))


@pytest.mark.parametrize("fence", ["call", "step"])
def test_memory_of_the_state_is_free_once_staged(disk: Path, fence: str) -> None:
    path = disk / "a.pt"
    with HeldTensor() as held:
        slow = fastckpt.save({"w": held.tensor}, path, options=fastckpt.SaveOptions(fence="step"))
        held.wait_reached()
        memory = Octets(1 << 20)
        freed = weakref.ref(memory)
        state = {"w": torch.frombuffer(memory, dtype=torch.float32)}
        del memory
        if len(os.sched_getaffinity(0)) < 2:
            held.release()
        handle = fastckpt.save(state, path, options=fastckpt.SaveOptions(fence=fence))
        del state
        handle.wait_staged(WAIT_S)
        alive, committed = freed() is not None, handle.done()
        assert not alive, "the save still holds the state"
        # On one CPU the first save had to be let go on for the second to be staged.
        assert not committed or len(os.sched_getaffinity(0)) < 2
    slow.result(WAIT_S)
    handle.result(WAIT_S)
    assert value_of(path) == 0


@pytest.mark.parametrize("fence", ["call", "step"])
def test_failed_save_does_not_keep_the_state_alive(disk: Path, fence: str) -> None:
    memory = Octets(1 << 20)
    freed = weakref.ref(memory)
    state = {"w": torch.frombuffer(memory, dtype=torch.float32)}
    del memory
    handle = fastckpt.save(state, disk / TOO_LONG, options=fastckpt.SaveOptions(fence=fence))
    del state
    assert isinstance(handle.exception(WAIT_S), fastckpt.StorageError)
    gc.collect()
    alive = freed() is not None
    assert not alive, "the error of the save holds the state"


def test_conflict_does_not_keep_the_state_alive(disk: Path) -> None:
    memory = Octets(1 << 20)
    freed = weakref.ref(memory)
    with HeldTensor() as held:
        state = [held.tensor, torch.frombuffer(memory, dtype=torch.float32)]
        del memory
        handle = fastckpt.save(state, disk / "a.pt", options=fastckpt.SaveOptions(fence="step"))
        held.wait_reached()
        state[1].add_(1)
        held.release()
    del state
    assert isinstance(handle.exception(WAIT_S), fastckpt.StagingConflict)
    gc.collect()
    alive = freed() is not None
    assert not alive, "the error of the save holds the state"


def test_handles_of_step_saves_are_not_collected_without_an_optimizer(disk: Path) -> None:
    gone = []
    for i in range(3):
        handle = fastckpt.save(filled(i), disk / "a.pt", options=fastckpt.SaveOptions(fence="step"))
        handle.result(WAIT_S)
        gone.append(weakref.ref(handle))
        del handle
    fastckpt.save(filled(9), disk / "a.pt", options=fastckpt.SaveOptions(fence="step")).result(
        WAIT_S
    )

    def are_gone() -> bool:
        gc.collect()
        return [ref() for ref in gone] == [None, None, None]

    wait_until(are_gone, "the handles of earlier saves are gone")


NOTHING_GROWS = """
import gc, os, sys, threading, time
import torch, fastckpt

def kilobytes(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return int(line.split()[1])

def threads():
    return len(os.listdir("/proc/self/task"))

folder = sys.argv[1]
state = {"w": torch.ones(1 << 18), "small": [torch.ones(10) for _ in range(50)]}

def turn(i):
    handle = fastckpt.save(
        state, f"{folder}/{i % 3}.pt", options=fastckpt.SaveOptions(fence=("call", "step")[i % 2])
    )
    handle.result(60)
    if i % 5 == 0:
        fastckpt.load(handle.path)
        try:
            fastckpt.save(state, f"{folder}/{'n' * 256}").result(60)
        except fastckpt.StorageError:
            pass
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(60)

for i in range(20):
    turn(i)
gc.collect()
fds, tasks, rss = os.listdir("/proc/self/fd"), threads(), [kilobytes("VmRSS")]
for i in range(60):
    turn(i)
    if i % 15 == 14:
        gc.collect()
        rss.append(kilobytes("VmRSS"))
assert len(os.listdir("/proc/self/fd")) == len(fds), os.listdir("/proc/self/fd")
for _ in range(1000):  # the thread that began a save's may be about to end, and is not listed
    if threads() <= tasks:
        break
    time.sleep(0.01)
assert threads() <= tasks, (tasks, threads())
# What is lost at each save is lost in every quarter; malloc keeps a tensor's memory now and then.
grown = min(after - before for before, after in zip(rss, rss[1:]))
assert grown <= 0.001 * rss[0], f"{rss} KiB, a quarter of 60 saves after another"
"""


@pytest.mark.multiprocess
def test_nothing_grows_over_many_saves(disk: Path) -> None:
    run_python(NOTHING_GROWS, disk)


def test_stats_are_plain_data() -> None:
    stats = fastckpt.SaveStats(stall_s=0.5, nbytes=7)
    assert stats == fastckpt.SaveStats(stall_s=0.5, nbytes=7)
    assert SimpleNamespace(**vars(stats)).nbytes == 7


def test_a_handle_shows_its_path_and_how_far_it_is(disk: Path) -> None:
    path = disk / "a.pt"
    with HeldTensor() as held:
        handle = fastckpt.save({"w": held.tensor}, path, options=fastckpt.SaveOptions(fence="step"))
        assert repr(handle) == f"<SaveHandle {str(path)!r}: copying>"
        held.release()
    stats = handle.result(WAIT_S)
    assert repr(handle) == f"<SaveHandle {str(path)!r}: committed: {stats}>"
    failed = fastckpt.save(filled(1), disk / TOO_LONG)
    error = failed.exception(WAIT_S)
    assert repr(failed) == f"<SaveHandle {failed.path!r}: failed: StorageError: {error}>"


def test_a_handle_shows_how_much_is_written(disk: Path) -> None:
    with held_up("sync") as (_storage, go_on):
        handle = fastckpt.save({"w": torch.ones(1 << 20)}, disk / "a.pt")
        wait_until(lambda: "a.pt': writing: all 4.02 MiB are written, but" in repr(handle))
        go_on.set()
        assert repr(handle.result(WAIT_S)).startswith("<SaveStats: 4.02 MiB in ")


def test_a_save_to_an_object_tells_its_type_and_size(disk: Path) -> None:
    buffer = io.BytesIO(b"before")
    buffer.seek(0, os.SEEK_END)
    handle = fastckpt.save(filled(1), buffer)
    assert handle.stats.nbytes == len(buffer.getvalue()) - len(b"before") > 0
    assert repr(handle) == f"<SaveHandle BytesIO object: committed: {handle.stats}>"
    for as_zip in (True, False):
        with (disk / "a.pt").open("wb") as file:
            handle = fastckpt.save(filled(1), file, _use_new_zipfile_serialization=as_zip)
        assert handle.stats.nbytes == (disk / "a.pt").stat().st_size
    pipe = SimpleNamespace(write=len, flush=lambda: None)  # what does not tell where it is
    handle = fastckpt.save(filled(1), pipe)
    assert "SimpleNamespace object: committed: bytes not counted, in " in repr(handle)


def test_stats_are_one_readable_line() -> None:
    stats = fastckpt.SaveStats(nbytes=2 << 30)
    assert str(stats) == "2.00 GiB, not committed"
    stats.committed_s, stats.stall_s, stats.backend, stats.direct = 0.5, 0.012, "io_uring", True
    assert str(stats) == (
        "2.00 GiB in 0.50 s (4.29 GB/s); the caller was blocked for 12.0 ms; io_uring, O_DIRECT"
    ).replace("0.50 s", "500 ms")
    stats.local_committed_s = 0.1
    assert "; on the node after 100 ms; " in str(stats)


def test_one_line_is_logged_for_a_load(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, stock = disk / "a.pt", disk / "stock.pt"
    fastckpt.save(filled(1), path).result(WAIT_S)
    torch.save(filled(1), stock)
    with caplog.at_level("INFO", "fastckpt"):
        for options in ({}, {"mmap": True}, {"mmap": True, "verify": False}):
            fastckpt.load(path, **options)
        fastckpt.load(stock)
    told = [line for line in caplog.messages if line.startswith("loaded ")]
    size = shown_size(path.stat().st_size)
    for line in told[:3]:
        assert re.fullmatch(rf"loaded {str(path)!r}: {size} in .* \(.*B/s\)", line)
    assert told[3].startswith(f"loaded {str(stock)!r}: in ") and "by torch.load" in told[3]
    assert len(told) == 4


def test_one_line_is_logged_for_a_commit(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fastckpt"):
        handle = fastckpt.save(filled(1), disk / "a.pt")
        handle.result(WAIT_S)
        fastckpt.saving.pipeline.current().drain()
        legacy = fastckpt.save(1, disk / "old.pt", _use_new_zipfile_serialization=False)
        fastckpt.save(1, io.BytesIO())
        failed = fastckpt.save(filled(1), disk / TOO_LONG)
        assert failed.exception(WAIT_S) is not None
        fastckpt.saving.pipeline.current().drain()
    told = [line for line in caplog.messages if line.startswith("saved")]
    assert told == [f"saved {h.path!r}: {h.stats}" for h in (handle, legacy)]


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="Python collects garbage between bytecodes alone"
)
def test_a_dict_that_changes_in_the_midst_of_a_copy() -> None:
    """As by another thread, which runs if garbage is collected there."""
    shared: dict[int, None] = {}

    class Garbage:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            if len(shared) > 4:
                del shared[max(shared)]

    thresholds, taken, changed = gc.get_threshold(), [], 0
    for _ in range(100):
        shared.update(dict.fromkeys(range(8)))
        Garbage()
        taken.append([{} for _ in range(90)])  # the dicts that Python had in reserve
        gc.set_threshold(1)
        items = items_of(shared)
        gc.set_threshold(*thresholds)
        assert [key for key, _ in items] == [*range(len(items))]
        changed += len(items) < 8
    assert changed, "nothing was collected meanwhile"
