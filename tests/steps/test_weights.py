"""Promise: a reader of published weights has exactly one version's bytes, always: whatever chain of
differences leads to it, whoever reads it, whatever kinds of tensors it has and whatever fails.

What is removed, damaged or killed meanwhile is test_weights_kept.py's business.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import fastckpt
from fastckpt import Checkpointer, IncompatibleCheckpoint, WeightPublisher, WeightSubscriber
from fastckpt.errors import CheckpointError
from tests.kit.doubles import FailAt, Recorder, process_on
from tests.kit.trees import bits
from tests.kit.weights import (
    FAST,
    ROWS,
    WAIT_S,
    Weights,
    assert_is,
    assert_same,
    base_of,
    chain,
    nonce_of,
    publishing,
    root,
    same,
    step,
    weights,
)

__all__ = ["chain", "root"]

# ---- what comes back ----


def test_every_reader_follows_the_chain(root: Path, tmp_path: Path) -> None:
    with publishing(root, full_every=3) as publish, WeightSubscriber(root) as beside:
        assert beside.next() is None
        for version in range(1, 8):
            why = publish(version)
            is_full = version in (1, 4, 7)
            assert (base_of(root, version) is None) == is_full == bool(why)
            assert_is(beside.next(), version)
            assert beside.next() is None
            with WeightSubscriber(root) as fresh:
                assert_is(fresh.next(), version)
            for path in (root, step(root, version)):
                with fastckpt.open(path) as tensors:
                    assert_same({name: tensors[name][...] for name in tensors}, weights(version))
            with Checkpointer(root) as checkpointer:
                blank = {name: torch.zeros_like(its) for name, its in weights(version).items()}
                assert checkpointer.restore(blank) == version
                assert_same(blank, weights(version))
                assert_same(checkpointer.load(version), weights(version))
    with WeightSubscriber(root) as fresh:
        update = fresh.next()
        assert update is not None
        update.to_directory(tmp_path / "exported")
    exported = safetensors.torch.load_file(tmp_path / "exported" / "model.safetensors")
    assert_same({name: exported[name] for name in weights(7)}, weights(7))


def test_several_versions_are_skipped_between_two_looks(root: Path) -> None:
    with publishing(root, full_every=4) as publish, WeightSubscriber(root) as beside:
        for version in range(1, 12):
            publish(version)
            if version in (1, 3, 4, 9, 11):  # within a chain, and across one or two full versions
                assert_is(beside.next(), version)


def test_an_update_is_applied_in_place(chain: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, ROWS), torch.nn.BatchNorm1d(ROWS))
    with publishing(chain) as publish, WeightSubscriber(chain) as subscriber:
        for version in (5, 6):
            publish(version, trained(model, version))
            other = torch.nn.Sequential(torch.nn.Linear(512, ROWS), torch.nn.BatchNorm1d(ROWS))
            where = [its.data_ptr() for its in other.state_dict().values()]
            update = subscriber.next()
            assert update is not None and subscriber.version != version
            update.apply(other)
            assert subscriber.version == version
            assert [its.data_ptr() for its in other.state_dict().values()] == where
            assert_same(other.state_dict(), {**model.state_dict()})


def trained(model: torch.nn.Module, version: int) -> torch.nn.Module:
    """The model after another step, which counts and moves its running statistics, too."""
    with torch.no_grad():
        model(torch.full((4, 512), float(version)) * torch.arange(4).view(4, 1))
        for parameter in model.parameters():
            parameter.add_(1e-3)
    return model


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda its: its.pop("layer.bias"), "the model has no tensor 'layer.bias'"),
        (lambda its: its.update(more=torch.zeros(2)), "version 4 has no tensor 'more'"),
        (lambda its: its.update(seen=torch.zeros(1)), r"for 'seen': \[\], must be \[1\]"),
    ],
)
def test_a_model_that_does_not_fit_stays_as_it_is(
    chain: Path, change: Callable[[Weights], None], told: str
) -> None:
    model = {name: torch.zeros_like(its) for name, its in weights(1).items()}
    change(model)
    with WeightSubscriber(chain) as subscriber:
        update = subscriber.next()
        assert update is not None
        with pytest.raises(IncompatibleCheckpoint, match=told):
            update.apply(model)
        assert subscriber.version is None
    assert all(not its.any() for its in model.values())


def test_an_update_is_valid_until_the_next_one(chain: Path) -> None:
    with publishing(chain) as publish, WeightSubscriber(chain) as subscriber:
        old = subscriber.next()
        assert old is not None and subscriber.next() is None
        assert_is(old, 4)
        publish(5)
        new = subscriber.next()
        for use in (lambda: dict(old), lambda: old.apply({}), lambda: old.to_directory("x")):
            with pytest.raises(CheckpointError, match="version 4 is no longer held"):
                use()
        assert_is(new, 5)
    with pytest.raises(CheckpointError, match="version 5 is no longer held"):
        dict(new)  # type: ignore[call-overload]


def test_a_version_is_waited_for_by_its_number(root: Path) -> None:
    with WeightSubscriber(root) as subscriber, publishing(root) as publish:
        with pytest.raises(CheckpointError, match="must be a version; found no version"):
            subscriber.wait_for()
        publish(1)
        for wanted in (1, None, 1):  # at first it is read, then it is held
            assert_is(subscriber.wait_for(wanted), 1)
        with pytest.raises(CheckpointError, match="must be version 2; found version 1"):
            subscriber.wait_for(2, timeout_s=0.1)
        later = threading.Thread(target=publish, args=(2,))
        later.start()
        assert_is(subscriber.wait_for(2, timeout_s=WAIT_S), 2)
        later.join()
        publish(3)
        with pytest.raises(CheckpointError, match="must be version 2; found version 3"):
            subscriber.wait_for(2, timeout_s=WAIT_S)  # at once: it never is the newest again
        assert_is(subscriber.wait_for(), 3)
        before = subscriber.newest()
        with pytest.raises(CheckpointError, match=f"version 3, after the one with nonce {before}"):
            subscriber.wait_for(3, after=before)
        publish(1)  # again, by a trainer that went back
        assert_is(subscriber.wait_for(1, after=before), 1)
    with pytest.raises(TypeError):
        subscriber.wait_for("1")  # type: ignore[arg-type]
    for look in (subscriber.next, subscriber.wait_for):
        with pytest.raises(ValueError, match=f"the WeightSubscriber of '{root}' is closed"):
            look()


def test_a_subscriber_that_is_closed_while_it_reads_holds_nothing(
    chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscriber = WeightSubscriber(chain)
    look, updates = subscriber._look, list[Any]()

    def closing() -> Any:
        updates.append(look())
        closer = threading.Thread(target=subscriber.close)
        closer.start()
        closer.join()  # it does not wait for the read
        return updates[-1]

    monkeypatch.setattr(subscriber, "_look", closing)
    with pytest.raises(ValueError, match="is closed"):
        subscriber.next()
    assert subscriber.nonce == "" and not subscriber._tensors
    with pytest.raises(CheckpointError, match="no longer held"):
        updates[0].apply({})
    with pytest.raises(ValueError, match="is closed"):
        subscriber.next()
    assert len(updates) == 1


def test_what_a_reader_has_written_into_its_copy_is_in_no_later_version(chain: Path) -> None:
    with publishing(chain) as publish, WeightSubscriber(chain) as subscriber:
        update = subscriber.next()
        assert update is not None
        for name in ("layer.weight", "seen"):
            update.tensors[name].zero_()
        publish(5)
        assert_is(subscriber.next(), 5)


# ---- what is published ----


EVERY_KIND: Weights = {
    "bfloat16": torch.randn(700, 30).to(torch.bfloat16),
    "float16": torch.randn(700, 30).half(),
    "float32": torch.randn(700, 30),
    "float64": torch.randn(700, 3).double(),
    "int8": torch.arange(20_000).to(torch.int8),
    "int64": torch.arange(300_000),
    "bool": torch.arange(99) % 3 == 0,
    "float8": torch.randn(700, 30).to(torch.float8_e4m3fn),
    "empty": torch.empty(0, 7),
    "empty int": torch.empty(0, dtype=torch.int32),
    "0-d": torch.tensor(3.5),
    "0-d int": torch.tensor(7),
    "transposed": torch.randn(40, 30).t(),
    "every other": torch.randn(400)[::2],
    "expanded": torch.randn(1, 5).expand(3, 5),
    "negative": torch._neg_view(torch.randn(50)),
}
EVERY_KIND["tied"] = EVERY_KIND["float32"]
EVERY_KIND["part of it"] = EVERY_KIND["float32"][5:9]


def changed(state: Weights) -> Weights:
    """Every tensor with another element, if it has any, laid out as it was."""
    found: Weights = {}
    done: dict[int, torch.Tensor] = {}
    for name, tensor in state.items():
        if id(tensor) in done:
            found[name] = done[id(tensor)]
            continue
        new = tensor.clone()
        if new.numel():
            octets = bits(new.contiguous())
            octets[-1] ^= 1
            new.copy_(octets.view(new.dtype).view(new.shape))
        found[name] = done[id(tensor)] = new
    return found


def test_every_kind_of_tensor_comes_back(root: Path) -> None:
    second = changed(EVERY_KIND)
    third = changed(second)
    with publishing(root) as publish, WeightSubscriber(root) as beside:
        for version, state in enumerate([EVERY_KIND, second, third, third]):
            publish(version, state)
            update = beside.next()
            assert update is not None
            plain = {name: its.resolve_neg() for name, its in state.items()}
            assert_same(dict(update), plain)
            with WeightSubscriber(root) as fresh:
                assert_same(dict(fresh.next() or ()), plain)
    assert base_of(root, 3) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_version_in_another_dtype(root: Path, dtype: torch.dtype) -> None:
    with publishing(root, dtype=dtype) as publish, WeightSubscriber(root) as beside:
        for version in (1, 2, 3):
            publish(version)
            cast = {
                name: its.to(dtype) if its.is_floating_point() else its
                for name, its in weights(version).items()
            }
            assert_same(dict(beside.next() or ()), cast)
    assert base_of(root, 3) is not None


def test_names_are_changed_and_left_out(root: Path) -> None:
    state = {"model": weights(1), "step": 3, "optimizer": {"m": torch.zeros(9)}}
    options = {"only": "model/*", "rename": {"^model/": "", "layer.": "l/"}}
    with publishing(root, **options) as publish:
        for version in (1, 2):
            publish(version, state)
    with WeightSubscriber(root) as subscriber:
        expected = {name.replace("layer.", "l."): its for name, its in weights(1).items()}
        assert_same(dict(subscriber.next() or ()), expected)
    with WeightSubscriber(root, like={"seen": torch.tensor(0)}) as subscriber:
        assert list(dict(subscriber.next() or ())) == ["seen"]
    with (
        WeightSubscriber(root, like={"other": torch.tensor(0)}) as subscriber,
        pytest.raises(IncompatibleCheckpoint, match="has no tensor 'other'"),
    ):
        subscriber.next()


@pytest.mark.filterwarnings("ignore")  # torch is about to remove some of these
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: torch.eye(9).to_sparse(), "'bad' is of layout torch.sparse_coo"),
        (lambda: torch.quantize_per_tensor(torch.ones(9), 0.1, 0, torch.qint8), "torch.qint8"),
        (lambda: torch.ones(9, dtype=torch.complex32), "torch.complex32"),
        (lambda: torch.empty(9, device="meta"), "'bad' is on the meta device"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), "'bad' is of layout"),
        (lambda: torch.masked.masked_tensor(torch.ones(2), torch.ones(2) > 0), "a MaskedTensor"),
    ],
)
def test_a_tensor_that_files_cannot_hold_is_refused(
    root: Path, make: Callable[[], torch.Tensor], told: str
) -> None:
    with publishing(root) as publish:
        with pytest.raises(TypeError, match=told):
            publish(1, {"bad": make(), **weights(1)})
        publish(2)
    with WeightSubscriber(root) as subscriber:
        assert_is(subscriber.next(), 2)


@pytest.mark.parametrize("state", [{}, {"n": 1}, {"": torch.ones(1)}])
def test_a_state_without_named_tensors_is_refused(root: Path, state: Any) -> None:
    with publishing(root) as publish, pytest.raises(ValueError, match=r"no tensor|no name"):
        publish(1, state)


def test_a_part_of_each_tensor(root: Path) -> None:
    """Also if the part moves between two versions: memory of the same shape has other bytes."""
    begin = 0

    def part(name: str, shape: tuple[int, ...]) -> list[slice] | None:
        return None if len(shape) != 2 else [slice(begin, begin + 100), slice(3, None)]

    with publishing(root) as publish, WeightSubscriber(root, part=part) as subscriber:
        for version, begin in enumerate([0, 0, 100, 500, 500]):
            publish(version)
            expected = weights(version)
            expected["layer.weight"] = expected["layer.weight"][begin : begin + 100, 3:]
            update = subscriber.next()
            assert_same(dict(update or ()), expected)
    with WeightSubscriber(root, part=part) as subscriber:
        update = subscriber.next()
        assert update is not None
        with pytest.raises(ValueError, match=r"may not have the whole version"):
            update.to_directory(root.parent / "export")


# ---- full or not ----


def test_the_first_version_of_a_publisher_is_full(chain: Path) -> None:
    with publishing(chain) as publish:
        assert publish(5) == "no step was saved before"
        assert publish(6) == ""


def test_a_version_of_other_tensors_is_full(root: Path) -> None:
    why = "its tensors or their division differ from the step before"
    with publishing(root) as publish, WeightSubscriber(root) as beside:
        publish(1)
        for version, state in enumerate(
            [
                weights(2, ROWS + 1),
                {**weights(3, ROWS + 1), "more": torch.ones(3)},
                {f"m.{name}": its for name, its in weights(3).items()},
                {f"m.{name}": its.to(torch.float64) for name, its in weights(3).items()},
            ],
            2,
        ):
            assert publish(version, state) == why
            assert_same(dict(beside.next() or ()), state)
            assert publish(version + 100, state) == ""
            assert_same(dict(beside.next() or ()), state)


def test_full_versions_alone_need_no_copy(root: Path) -> None:
    with WeightPublisher(root, full_every=1, options=FAST) as publisher:
        for version in (1, 2):
            publisher.publish(weights(version), version).result(WAIT_S)
            assert publisher._versions.snapshot.nbytes == 0
    assert base_of(root, 2) is None
    with WeightSubscriber(root) as subscriber:
        assert_is(subscriber.next(), 2)


def test_too_little_memory_for_a_copy_fails_the_version(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_fd: int, _nbytes: int) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with WeightPublisher(root, options=FAST) as publisher:
        with monkeypatch.context() as patched:
            patched.setattr("fastckpt.steps.snapshot.mmap", SimpleNamespace(mmap=refused))
            with pytest.raises(CheckpointError, match=r"MiB of host memory .* full_every=1"):
                publisher.publish(weights(1), 1).result(WAIT_S)
        publisher.publish(weights(2), 2).result(WAIT_S)


def test_a_version_after_a_large_difference_is_full(root: Path) -> None:
    def noise(seed: int) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        octets = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=generator)
        return {"w": octets.view(torch.float32)}

    with publishing(root) as publish, WeightSubscriber(root) as beside:
        whys = []
        for version in range(5):
            whys.append(publish(version, noise(version)))
            assert_same(dict(beside.next() or ()), noise(version))
    assert whys[0] and not whys[1] and not whys[3]
    assert whys[2] == whys[4] and whys[2].startswith("the last difference took 1")


@pytest.mark.parametrize("by_commit", [False, True])
def test_a_version_after_a_failed_one_is_full(root: Path, by_commit: bool) -> None:
    """Any operation may fail: some of those before the commit, and the commit itself."""
    storage = Recorder()
    with process_on(storage), publishing(root) as publish:
        publish(1)
        begun = len(storage.log)
        publish(2)
    log = storage.log[begun:]
    commits = [at for at, its in enumerate(log) if its.name == "rename"]
    shutil.rmtree(root)
    storage = FailAt(commits[0] + begun if by_commit else begun + commits[0] // 2, errno.EIO)
    committed = [1]
    with process_on(storage), publishing(root) as publish:
        publish(1)
        has_failed = False
        for version in range(2, 9):
            try:
                why = publish(version)
            except CheckpointError:
                has_failed = True
                continue
            assert why == ("the save before failed" if has_failed else "")
            has_failed = False
            committed.append(version)
        assert len(storage.log) > storage._number, "the operation was reached"
    assert len(committed) >= 7
    for version in committed:
        with fastckpt.open(step(root, version)) as tensors:
            assert_same({name: tensors[name][...] for name in tensors}, weights(version))


def test_versions_in_flight_follow_each_other(root: Path) -> None:
    """Each is the difference from the one before, which is committed when it is staged."""
    with (
        WeightPublisher(root, keep=9, options=FAST) as publisher,
        WeightSubscriber(root) as beside,
    ):
        states = [weights(version) for version in range(1, 6)]
        handles = [publisher.publish(its, version) for version, its in enumerate(states, 1)]
        for handle in handles:
            handle.result(WAIT_S)
        assert_is(beside.next(), 5)
    assert [base_of(root, version) for version in range(1, 6)] == [
        None,
        *(nonce_of(root, version) for version in range(1, 5)),
    ]


def test_tied_tensors_of_a_model_receive_a_difference_once(disk: Path) -> None:
    """A restore and load_into() have one target for each name, and both have the same memory."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Linear(700, 500, bias=False)
            self.head = torch.nn.Linear(700, 500, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    with publishing(disk) as publish:
        for version in (1, 2, 3):
            with torch.no_grad():
                model.embedding.weight[version] += 1
            assert (publish(version, model) == "") == (version > 1)
    expected = model.embedding.weight.detach().clone()
    for fill in (
        lambda found: fastckpt.Checkpointer(disk).restore(found.state_dict()),
        lambda found: fastckpt.load_into(found, disk),
    ):
        found = Tied()
        fill(found)
        assert torch.equal(found.head.weight, expected)


def test_a_subscriber_works_within_inference_mode(disk: Path) -> None:
    with publishing(disk) as publish, WeightSubscriber(disk) as subscriber:
        for version in (1, 2):
            publish(version)
            with torch.inference_mode():
                assert_is(subscriber.next(), version)


@pytest.mark.parametrize(
    "part", [(slice(0, 9, 2), slice(None)), (slice(0, 9),), slice(0, 9), (1, 2)], ids=repr
)
def test_a_part_that_is_not_of_slices_is_refused_by_name(disk: Path, part: Any) -> None:
    with publishing(disk) as publish:
        publish(1)
    parts = {"layer.weight": part}.get
    with (
        WeightSubscriber(disk, part=lambda name, _shape: parts(name)) as subscriber,
        pytest.raises(ValueError, match=r"for 'layer.weight', must be slices without steps"),
    ):
        subscriber.next()


@pytest.mark.parametrize("shape", [(599, 512), (601, 512), (600,), (600, 512, 1)])
def test_a_model_of_another_shape_is_refused_before_the_read(
    disk: Path, shape: tuple[int, ...]
) -> None:
    like = {"layer.weight": torch.zeros(shape)}
    with publishing(disk) as publish, WeightSubscriber(disk, like=like) as subscriber:
        publish(1)
        with pytest.raises(
            IncompatibleCheckpoint, match=r"'layer.weight' has the shape \[600, 512"
        ):
            subscriber.next()
    with WeightSubscriber(disk, like={"layer.weight": torch.zeros(600, 512)}) as subscriber:
        assert same(dict(subscriber.next() or ())["layer.weight"], weights(1)["layer.weight"])


def test_a_directory_is_no_memory(disk: Path) -> None:
    with pytest.raises(TypeError, match=r"must be a fastckpt.Memory"):
        WeightPublisher(disk / "run", local="/dev/shm")  # type: ignore[arg-type]
