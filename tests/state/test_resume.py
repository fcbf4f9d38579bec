"""Promise: with Generators and a ResumableLoader in its state, a run that was stopped after any
step continues bit for bit as if it had not been.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import data
from torch.utils.data.distributed import DistributedSampler

import fastckpt
from fastckpt import Checkpointer, Generators, PerRank, ResumableLoader
from tests.crews.group_crew import Crew, Member

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
except ImportError:
    StatefulDataLoader = StatefulDistributedSampler = None

SAMPLES, STEPS = 11, 7  # batches of 3 or so: the last step is in the second epoch
ENTRIES = 8  # of a Run's state, beside the generators
PLAIN = {dict, list, str, int, float, bool, type(None), torch.Tensor}


def seed(number: int) -> None:
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def drawn() -> list[float]:
    """What a training step draws, of all generators of the process."""
    return [torch.rand(1).item(), numpy.random.standard_normal(), random.gauss(0, 1)]


class Augmented(data.Dataset):
    """Samples with noise from all generators, or without."""

    def __init__(self, noise: float = 1.0, samples: int = SAMPLES) -> None:
        self.noise, self.samples = noise, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index)) + self.noise * sum(drawn())


class Stream(data.IterableDataset):
    """Samples in an order of the stream's own generator, divided among workers."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.generator, self.samples = random.Random(3), samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = data.get_worker_info()
        begin, by = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = [*range(begin, self.samples, by)]
        self.generator.shuffle(mine)
        yield from (torch.full((2,), index + sum(drawn())) for index in mine)


class Shuffled(data.Sampler):
    """An order that is drawn from generators which a DataLoader does not draw from."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = numpy.random.permutation(SAMPLES).tolist()
        random.shuffle(order)
        yield from order


def loader(workers: int, batch: int | None = 3, **options: Any) -> data.DataLoader:
    samples = options.pop("samples", None) or Augmented()
    return data.DataLoader(samples, **options, num_workers=workers, **sized(batch))


def stateful(workers: int, batch: int | None = 3, **options: Any) -> Any:
    """Of samples without noise, if workers would draw it."""
    samples = Augmented(noise=float(not workers))
    return StatefulDataLoader(samples, **options, num_workers=workers, **sized(batch))


def sized(batch: int | None) -> dict[str, Any]:
    return {} if batch == 0 else {"batch_size": batch}


def of_one_rank(kind: Any = DistributedSampler) -> Any:
    return kind(range(SAMPLES), 2, 1, seed=4)


def random_order(**options: Any) -> data.RandomSampler:
    return data.RandomSampler(range(SAMPLES), generator=torch.Generator(), **options)


def weighted() -> data.WeightedRandomSampler:
    return data.WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)


LOADERS: dict[str, Callable[[int], Any]] = {
    "shuffle": lambda n: loader(n, shuffle=True),
    "own generator": lambda n: loader(n, shuffle=True, generator=torch.Generator()),
    "sequential": lambda n: loader(n),
    "single samples": lambda n: loader(n, None, shuffle=True),
    "whole batches": lambda n: loader(
        n, shuffle=True, generator=torch.Generator(), samples=Augmented(samples=9)
    ),
    "replacement": lambda n: loader(n, sampler=random_order(replacement=True)),
    "weighted": lambda n: loader(n, sampler=weighted()),
    "own sampler": lambda n: loader(n, sampler=Shuffled()),
    "batches": lambda n: loader(n, 0, batch_sampler=data.BatchSampler(random_order(), 3, True)),
    "distributed": lambda n: loader(n, 2, sampler=of_one_rank()),
    "distributed batches": lambda n: loader(
        n, 0, batch_sampler=data.BatchSampler(of_one_rank(), 2, False)
    ),
    "stream": lambda n: loader(n, samples=Stream()),
}
STATEFUL: dict[str, Callable[[int], Any]] = {
    "shuffle": lambda n: stateful(n, shuffle=True),
    "own generator": lambda n: stateful(n, shuffle=True, generator=torch.Generator()),
    "distributed": lambda n: stateful(n, 2, sampler=of_one_rank()),
    "torchdata's": lambda n: stateful(n, 2, sampler=of_one_rank(StatefulDistributedSampler)),
    "rare snapshots": lambda n: stateful(n, shuffle=True, snapshot_every_n_steps=3),
}
needs_torchdata = pytest.mark.skipif(StatefulDataLoader is None, reason="needs torchdata")
CASES = [
    *(pytest.param(make, id=name) for name, make in LOADERS.items()),
    *(
        pytest.param(make, id=f"stateful, {name}", marks=needs_torchdata)
        for name, make in STATEFUL.items()
    ),
]


def through_a_file(state: object) -> Any:
    """A state as a file gives it back that may run no code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def states(batches: ResumableLoader) -> tuple[Any, Any]:
    return batches.state_dict().value, Generators().state_dict().value


def step(batches: ResumableLoader) -> tuple[Any, ...]:
    batch = next(batches)
    return batches.epoch, batches.position, batch.tolist(), drawn()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", CASES)
def test_each_loader_continues_with_the_same_batches(
    make: Callable[[int], Any], workers: int
) -> None:
    seed(1)
    batches, saved, straight = ResumableLoader(make(workers)), [], []
    for _ in range(STEPS):
        saved.append(through_a_file(states(batches)))
        straight.append(step(batches))
    for number in range(STEPS) if not workers else [2, 5]:
        batches = ResumableLoader(make(workers))
        seed(number + 2)
        before = drawn()
        seed(number + 2)
        batches.load_state_dict(saved[number][0])
        assert drawn() == before, "a replay disturbs the generators of the process"
        Generators().load_state_dict(saved[number][1])
        assert [step(batches) for _ in straight[number:]] == straight[number:]


class Drawing:
    """An object that draws while it is restored."""

    def state_dict(self) -> dict[str, int]:
        drawn_by = {"a": 1}
        return drawn_by

    def load_state_dict(self, saved: dict[str, int]) -> None:
        drawn()


class Run:
    """A training run.

    Attributes:
        state: all that it continues with, with the generators at `place`.
    """

    def __init__(self, number: int, make: Callable[[int], Any], workers: int, place: int) -> None:
        seed(number)
        layers = [torch.nn.Linear(2, 5), torch.nn.Dropout(), torch.nn.Linear(5, 1)]
        self.model = torch.nn.Sequential(*layers)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        self.batches = ResumableLoader(make(workers))
        entries = [
            ("drawing", Drawing()),
            ("model", self.model),
            ("ema", self.ema),
            ("batches", self.batches),
            ("optimizer", self.optimizer),
            ("scheduler", self.scheduler),
            ("scaler", self.scaler),
            ("last", Drawing()),
        ]
        entries.insert(place, ("generators", Generators()))
        self.state = dict(entries)

    def train(self, begin: int, checkpointer: Checkpointer | None = None) -> bytes:
        """Trains up to the last step, saving after each; returns all that the run ends with."""
        losses = []
        for number in range(begin, STEPS):
            loss = self.model(next(self.batches)).square().mean() + sum(drawn())
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.ema.update_parameters(self.model)
            losses.append(loss.item())
            if checkpointer is not None:
                checkpointer.save(number + 1, self.state)
        ends = [losses[-1], self.scaler.state_dict(), drawn(), self.batches.state_dict().value]
        for each in (self.model, self.ema, self.optimizer, self.scheduler):
            ends.append([*map(str, torch.utils._pytree.tree_leaves(each.state_dict()))])
        self.state.clear()
        del self.batches  # whose workers end now
        with torch._tensor_str.printoptions(precision=17, threshold=10_000):
            return repr(ends).encode()


def continued(disk: Path, number: int, *run: Any) -> bytes:
    """How a new run ends that continues after a step."""
    resumed = Run(100 + number, *run)
    with Checkpointer(disk) as checkpointer:
        assert checkpointer.restore(resumed.state, number) == number
    return resumed.train(number)


@pytest.fixture
def straight(disk: Path) -> Callable[..., bytes]:
    def run(make: Callable[[int], Any], workers: int) -> bytes:
        ended = Run(1, make, workers, 0).train(0)
        with Checkpointer(disk) as checkpointer:
            assert Run(1, make, workers, 3).train(0, checkpointer) == ended, "saves disturb it"
        assert Run(2, make, workers, 0).train(0) != ended
        return ended

    return run


@pytest.mark.parametrize(
    "make",
    [LOADERS["shuffle"], pytest.param(STATEFUL["shuffle"], marks=needs_torchdata)],
    ids=["replayed", "stateful"],
)
def test_a_run_that_is_stopped_after_any_step_continues_bit_for_bit(
    make: Callable[[int], Any], straight: Callable[..., bytes], disk: Path
) -> None:
    """With workers that draw, and dropout."""
    ended = straight(make, 2)
    for number in range(1, STEPS):
        assert continued(disk, number, make, 2, 0) == ended, number


def test_the_generators_may_be_at_any_place(straight: Callable[..., bytes], disk: Path) -> None:
    """Of the state, whose other objects draw while they are restored."""
    ended = straight(LOADERS["shuffle"], 0)
    for place in range(ENTRIES + 1):
        for number in (2, STEPS - 1):
            assert continued(disk, number, LOADERS["shuffle"], 0, place) == ended, place


def test_loaders_may_share_a_generator(disk: Path) -> None:
    """Which is passed, too, as is one that only the data set draws from."""

    def built(number: int) -> tuple[list[ResumableLoader], numpy.random.Generator, dict[str, Any]]:
        seed(number)
        shared, noise = torch.Generator().manual_seed(number), numpy.random.default_rng(number)
        samples = [torch.rand(1) for _ in range(SAMPLES)]
        options: Any = {"shuffle": True, "generator": shared}
        options["collate_fn"] = lambda batch: len(batch) + noise.random()
        loaders = [ResumableLoader(data.DataLoader(samples, n, **options)) for n in (2, 3)]
        generators = Generators(shared, noise)
        return loaders, noise, {"generators": generators, "train": loaders[0], "test": loaders[1]}

    def steps(loaders: list[ResumableLoader], noise: Any) -> list[Any]:
        return [(next(loaders[n]), drawn(), noise.random()) for n in (0, 0, 1, 0, 1, 1, 1, 0, 0)]

    loaders, noise, state = built(1)
    steps(loaders, noise)
    with Checkpointer(disk) as checkpointer:
        checkpointer.save(1, state)
        straight = steps(loaders, noise)
        loaders, noise, state = built(2)
        steps(loaders, noise)
        checkpointer.restore(state)
    assert steps(loaders, noise) == straight


def test_a_running_loader_goes_back_to_a_step(disk: Path) -> None:
    """In the same process, in the midst of an epoch's loop."""
    batches = ResumableLoader(LOADERS["shuffle"](0))
    state = {"generators": Generators(), "batches": batches}
    with Checkpointer(disk) as checkpointer:
        next(batches)
        checkpointer.save(1, state)
        first = [(batch.tolist(), batches.position, drawn()) for batch in batches]
        assert (batches.epoch, batches.position) == (1, 0) and len(first) == len(batches) - 1
        for _ in batches:
            break
        assert (batches.epoch, batches.position) == (1, 1)
        checkpointer.restore(state)
        assert (batches.epoch, batches.position) == (0, 1)
        assert [(batch.tolist(), batches.position, drawn()) for batch in batches] == first


@pytest.mark.parametrize("make", CASES)
def test_a_loop_over_epochs_continues_where_it_was(make: Callable[[int], Any]) -> None:
    """Also between two epochs, where no iterator is there."""
    seed(1)
    batches, saved, seen = ResumableLoader(make(0)), [], []
    for _ in range(3):
        saved.append((len(seen), through_a_file(states(batches))))
        for batch in batches:
            seen.append((batches.epoch, batches.position, batch.tolist(), drawn()))
            saved.append((len(seen), through_a_file(states(batches))))
    count = len(seen) // 3
    assert [where[:2] for where in seen] == [(n, i + 1) for n in range(3) for i in range(count)]
    for count, (own, generators) in saved:
        batches = ResumableLoader(make(0))
        batches.load_state_dict(own)
        Generators().load_state_dict(generators)
        rest = []
        for _ in range(batches.epoch, 3):
            for batch in batches:
                rest.append((batches.epoch, batches.position, batch.tolist(), drawn()))
        assert rest == seen[count:]


@pytest.mark.parametrize("name", ["distributed", "distributed batches"])
def test_a_sampler_knows_the_epoch(name: str) -> None:
    samples = LOADERS[name](0)
    samples.dataset.noise = 0.0
    batches = ResumableLoader(samples)
    orders = [[batch.tolist() for batch in batches] for _ in range(3)]
    for epoch, order in enumerate(orders):
        sampler = of_one_rank()
        sampler.set_epoch(epoch)
        assert [sample[0] for batch in order for sample in batch] == [*sampler]


def test_any_object_that_restores_itself_is_a_loader() -> None:
    class Numbers:
        begin = 0

        def __iter__(self) -> Iterator[int]:
            while self.begin < 4:
                self.begin += 1
                yield self.begin
            self.begin = 0

        def state_dict(self) -> dict[str, int]:
            return {"begin": self.begin}

        def load_state_dict(self, saved: dict[str, int]) -> None:
            self.begin = saved["begin"]

    batches = ResumableLoader(Numbers())
    assert [next(batches) for _ in range(6)] == [1, 2, 3, 4, 1, 2]
    other = ResumableLoader(Numbers())
    other.load_state_dict(batches.state_dict())
    assert [*other] == [3, 4] and (other.epoch, next(other)) == (2, 1)


def test_a_loader_without_batches_ends() -> None:
    empty = ResumableLoader(data.DataLoader([], 3))
    assert [*empty] == [] and next(empty, "none") == "none"


KINDS: list[Callable[[int], Any]] = [
    lambda n: torch.Generator().manual_seed(n),
    random.Random,
    numpy.random.RandomState,
    *(
        lambda n, bits=bits: numpy.random.Generator(bits(n))
        for bits in (
            numpy.random.MT19937,
            numpy.random.PCG64,
            numpy.random.PCG64DXSM,
            numpy.random.Philox,
            numpy.random.SFC64,
        )
    ),
]


def numbers(generator: Any) -> Any:
    """The next numbers, so few that a state is in the midst of what it has drawn ahead."""
    if isinstance(generator, torch.Generator):
        return torch.randn(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return generator.gauss(0, 1), generator.random()
    if isinstance(generator, numpy.random.RandomState):
        return generator.standard_normal(3).tolist()
    return generator.integers(9, size=3, dtype="uint32").tolist(), generator.random()


def test_generators_of_all_kinds_are_saved_without_code(disk: Path) -> None:
    saved = [make(5) for make in KINDS]
    before = [*map(numbers, saved)]
    with Checkpointer(disk) as checkpointer:
        checkpointer.save(1, {"all": Generators(*saved), "in one": PerRank(Generators(*saved))})
        wanted = [*map(numbers, saved)], drawn()
        for entry in ("all", "in one"):
            others = [make(6) for make in KINDS]
            assert [*map(numbers, others)] != before
            own = Generators(*others)
            state = {entry: own if entry == "all" else PerRank(own)}
            checkpointer.restore(state, weights_only=True)
            assert ([*map(numbers, others)], drawn()) == wanted
        loaded = checkpointer.load(weights_only=True)["all"]
    assert kinds_in(loaded.value) <= PLAIN


def kinds_in(value: Any) -> set[type]:
    """The types of a nest."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {type(value)}.union(*map(kinds_in, items))


def test_generators_of_devices_go_back_to_their_devices(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By what torch.cuda offers; another process may have fewer devices."""
    devices = [torch.tensor([number], dtype=torch.uint8) for number in range(3)]
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert "devices" not in Generators().state_dict().value
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda number: devices[number])
    found: dict[int, int] = {}
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, number: found.update({number: state.item()})
    )
    saved = through_a_file(Generators().state_dict().value)
    Generators().load_state_dict(saved)
    assert found == {0: 0, 1: 1, 2: 2} and not caplog.messages
    found.clear()
    del devices[1:]
    Generators().load_state_dict(saved)
    assert found == {0: 0}
    assert caplog.messages[0].startswith("generators of 3 cuda devices were saved, but this")


# Several ranks


def save_of_rank(member: Member, root: str) -> Any:
    """The numbers and batches of a rank after its save."""
    seed(member.rank)
    own, batches = random.Random(member.rank), ResumableLoader(LOADERS["shuffle"](0))
    state = {"generators": Generators(own), "batches": batches}
    with Checkpointer(root) as checkpointer:
        next(batches)
        checkpointer.save(1, state).result()
    return drawn(), own.random(), next(batches).tolist()


def restore_of_rank(member: Member, root: str, kind: str) -> Any:
    """The numbers and batches of a rank after a restore, or what it raised; and its numbers
    without a restore.
    """
    seed(50 + member.rank)
    alone = drawn()
    seed(50 + member.rank)
    own, batches = random.Random(9), ResumableLoader(LOADERS["shuffle"](0))
    entry = PerRank(batches, merge=lambda saved, *_: saved[0]) if kind == "merged" else batches
    state = {"generators": Generators(own)} | ({} if kind == "generators" else {"batches": entry})
    with Checkpointer(root) as checkpointer:
        try:
            checkpointer.restore(state)
        except ValueError as error:
            return str(error), alone
    if kind == "generators":
        return (drawn(), own.random()), alone
    return (drawn(), own.random(), next(batches).tolist()), alone


@pytest.mark.multiprocess
def test_each_rank_has_its_own(crew: Callable[[int], Crew], disk: Path) -> None:
    saved = crew(2)(save_of_rank, str(disk))
    assert saved[0] != saved[1]
    assert [found for found, _ in crew(2)(restore_of_rank, str(disk), "all")] == saved
    *old, (new, alone) = crew(3)(restore_of_rank, str(disk), "generators")
    assert [found for found, _ in old] == [each[:2] for each in saved]
    assert new == (alone, random.Random(9).random())


@pytest.mark.multiprocess
def test_a_new_rank_needs_a_position(crew: Callable[[int], Crew], disk: Path) -> None:
    saved = crew(2)(save_of_rank, str(disk))
    *old, (new, _) = crew(3)(restore_of_rank, str(disk), "all")
    assert [found for found, _ in old] == saved
    assert "'batches'" in new and "no position for this rank, because fewer ranks saved it" in new
    merged = [found for found, _ in crew(3)(restore_of_rank, str(disk), "merged")]
    assert all(type(found) is tuple for found in merged), merged
    assert [found[:2] for found in merged[:2]] == [each[:2] for each in saved]


# Refusals


@pytest.mark.parametrize(
    ("saved", "other", "message"),
    [
        (lambda: loader(0), lambda: loader(0, 2), r"batches was 4, is 6, batch_size was 3, is 2"),
        (
            lambda: loader(0),
            lambda: loader(0, samples=Augmented(samples=20)),
            "batches was 4, is 7",
        ),
        (lambda: loader(0), LOADERS["stream"], "batches was 4, is None, num_workers was None, is"),
        (
            lambda: LOADERS["stream"](1),
            lambda: LOADERS["stream"](2),
            "num_workers was 1, is 2",
        ),
        (
            lambda: LOADERS["shuffle"](0),
            lambda: LOADERS["own generator"](0),
            r"generators was 0, is 1\).*make the loader as it was",
        ),
        (
            lambda: loader(0, samples=Stream()),
            lambda: loader(0, samples=Stream(samples=4)),
            "3 batches of the epoch were taken, but the loader has only 2 now",
        ),
    ],
    ids=["batch", "length", "kind", "workers", "generators", "stream"],
)
def test_another_loader_is_refused(
    saved: Callable[..., Any], other: Callable[..., Any], message: str, disk: Path
) -> None:
    batches = ResumableLoader(saved())
    with Checkpointer(disk) as checkpointer:
        for _ in range(3):
            next(batches)
        checkpointer.save(1, {"batches": batches}).result()
        made = other(0) if other is LOADERS["stream"] else other()
        with pytest.raises(ValueError, match=rf"'batches', ResumableLoader, .*{message}"):
            checkpointer.restore({"batches": ResumableLoader(made)})


def test_what_cannot_be_restored_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"loader is list, must be a torch DataLoader or have"):
        ResumableLoader([1, 2])
    with pytest.raises(ValueError, match=r"has persistent_workers=True.*pass .*=False"):
        ResumableLoader(loader(1, persistent_workers=True))
    for wrong in (random.SystemRandom(), 7, torch.rand):
        with pytest.raises(TypeError, match=r"is not a generator whose state can be saved: pass"):
            Generators(wrong)


@needs_torchdata
def test_lasting_workers_are_refused_of_any_loader() -> None:
    with pytest.raises(ValueError, match="has persistent_workers=True"):
        ResumableLoader(stateful(1, persistent_workers=True))


def test_batches_without_an_order_are_refused() -> None:
    made = loader(1)
    made.in_order = False  # an argument from torch 2.7 on
    with pytest.raises(ValueError, match=r"has in_order=False.*pass in_order=True"):
        ResumableLoader(made)


def test_states_of_other_generators_are_refused() -> None:
    saved = Generators(torch.Generator(), random.Random()).state_dict()
    with pytest.raises(ValueError, match=r"2 other generators were saved, but 1 are here"):
        Generators(torch.Generator()).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"saved state of Random is a Tensor, expected a list"):
        Generators(random.Random(), torch.Generator()).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"not what Generators saved"):
        Generators().load_state_dict({"torch": torch.get_rng_state()})
    with pytest.raises(ValueError, match=r"expected the state of a ResumableLoader"):
        ResumableLoader(loader(0)).load_state_dict({"taken": 3})


def test_the_names_are_the_package_s() -> None:
    assert fastckpt.Generators.__module__ == fastckpt.ResumableLoader.__module__ == "fastckpt"
