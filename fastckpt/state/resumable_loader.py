"""A data loader that continues in the middle of an epoch.

The module counts the batches that were taken of a loader, and loads them again after a restart, or
lets the loader restore itself. It must not know how a state is saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from fastckpt.state.generators import all_states, is_generator, set_all_states
from fastckpt.state.tree import PerRank, is_stateful

_END = object()  # of an epoch
# Workers that outlive an epoch keep random states, and batches that overtake others have no number.
_REPEATABLE = {"persistent_workers": False, "in_order": True}


class ResumableLoader:
    """A torch DataLoader that continues after a restart at the batch at which it stopped.

    `next(loader)` returns batches without end, epoch after epoch. `for batch in loader` iterates
    over the rest of the present epoch, which is all of it if no batch was taken. `len(loader)` is
    that of the DataLoader. At the begin of each epoch, set_epoch(epoch) is called on the sampler
    and the data set, if they have it (as DistributedSampler has).

    A restore loads the batches of the epoch that were taken again, with the generators as they were
    when the epoch began. It then puts the generators of this process back. With Generators in the
    same state, all batches are bit-equal to those of a run without a restart, under conditions:

    - Data set, sampler and number of workers are the same.
    - What samplers and data sets keep from epoch to epoch is either their random generator, as the
      attribute `generator`, or in the state by itself.
    - A sampler, or an iterable data set without workers, draws from the generators of the process
      only at the begin of an epoch. It may draw from its own at any time.

    A loader with state_dict and load_state_dict, such as torchdata's StatefulDataLoader, restores
    itself and does not load batches again. It does not save the random generators of its workers,
    so its batches are bit-equal if the data set draws no random numbers in workers.

    Each rank saves and restores its own position, as with PerRank.

    Args:
        loader: a DataLoader, or a loader with state_dict and load_state_dict.

    Attributes:
        loader: the loader.
        epoch: the number of the present epoch, from 0.
        position: how many batches of the epoch were taken.

    Raises:
        TypeError: the argument is no such loader.
        ValueError: the loader has persistent_workers=True or in_order=False, with which batches
            cannot be repeated.
    """

    __module__ = "fastckpt"

    def __init__(self, loader: Any) -> None:
        self._restores_itself = is_stateful(loader)
        if not (self._restores_itself or isinstance(loader, DataLoader)):
            raise TypeError(
                f"loader is {type(loader).__name__}, must be a torch DataLoader or have state_dict "
                "and load_state_dict"
            )
        for name, fit in _REPEATABLE.items():
            if getattr(loader, name, fit) != fit:
                raise ValueError(
                    f"the loader has {name}={not fit}, and its batches cannot be repeated after a "
                    f"restart: pass {name}={fit}"
                )
        self.loader = loader
        self.epoch, self.position = 0, 0
        self._batches: Iterator[Any] | None = None
        self._began: dict[str, Any] | None = None  # the generators when the epoch began
        sampler = getattr(loader, "batch_sampler", None)
        inner = getattr(loader, "sampler", None), getattr(sampler, "sampler", None)
        self._parts = _unique([loader, sampler, *inner, getattr(loader, "dataset", None)])
        generators = _unique([getattr(part, "generator", None) for part in self._parts])
        self._own = [each for each in generators if is_generator(each)]

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        while (batch := self._next()) is not _END:
            yield batch

    def __next__(self) -> Any:
        for _ in range(2):  # the second time of the next epoch
            if (batch := self._next()) is not _END:
                return batch
        raise StopIteration  # an epoch has no batch

    def state_dict(self) -> PerRank:
        """Returns a PerRank with this rank's position in the data."""
        runs = self._batches is not None
        return PerRank(
            {
                "epoch": self.epoch,
                "position": self.position,
                "facts": self._facts(),
                "began": self._began,
                "generators": all_states(self._own)["more"],
                # Without an iterator it would make one, which draws random numbers.
                "loader": self.loader.state_dict() if runs and self._restores_itself else None,
            }
        )

    def load_state_dict(self, state_dict: Any, /) -> None:
        """Continues at a saved position.

        Args:
            state_dict: what state_dict() returned, or the value in it.

        Raises:
            ValueError: the loader differs from the one that was saved in its number of batches,
                batch size, or generators; an IterableDataset has another number of workers; or this
                rank has saved nothing.
        """
        if isinstance(state_dict, PerRank):
            if state_dict.found is False:
                raise ValueError(
                    "the checkpoint has no position for this rank, because fewer ranks saved it: "
                    "divide the data among the ranks anew, and put PerRank(loader, merge=f) into "
                    "the state, where f returns a position for this rank"
                )
            state_dict = state_dict.value
        self._check(state_dict)
        # The loader draws from its own generators and, as the data set may, from the process's.
        after = all_states(self._own) | {"more": state_dict["generators"]}
        try:
            self._resume(state_dict)
        finally:
            set_all_states(self._own, after)

    def _next(self) -> Any:
        """Returns the next batch of the epoch; _END after the last."""
        if self._batches is None:
            self._began = None if self._restores_itself else all_states(self._own)
            self._batches, self.position = self._begun(), 0
        if (batch := next(self._batches, _END)) is _END:
            self._batches, self._began = None, None
            self.epoch, self.position = self.epoch + 1, 0
        else:
            self.position += 1
        return batch

    def _begun(self) -> Iterator[Any]:
        for part in self._parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
        return iter(self.loader)

    def _resume(self, saved: dict[str, Any]) -> None:
        """Makes the iterator of the epoch, and brings it to where it was."""
        self.epoch, self.position, self._began = saved["epoch"], saved["position"], saved["began"]
        self._batches = None
        if saved["loader"] is not None:
            self.loader.load_state_dict(saved["loader"])
            self._batches = self._begun()
        elif self._began is not None:
            set_all_states(self._own, self._began)
            batches = self._begun()
            for number in range(self.position):
                if next(batches, _END) is _END:
                    raise ValueError(
                        f"{self.position} batches of the epoch were taken, but the loader has only "
                        f"{number} now: its data set must have the same samples"
                    )
            self._batches = batches

    def _facts(self) -> dict[str, Any]:
        """Returns facts about the loader, without which a position means other samples."""
        its, length = self.loader, None
        is_iterable = isinstance(getattr(its, "dataset", None), IterableDataset)
        with suppress(TypeError):  # of loaders that do not know their length
            length = None if is_iterable else len(its)
        sampler = getattr(its, "batch_sampler", None)
        size = getattr(its, "batch_size", None) or getattr(sampler, "batch_size", None)
        return {
            "batches": length,
            "batch_size": size,
            "num_workers": its.num_workers if is_iterable else None,
            "generators": len(self._own),
            "state_dict": self._restores_itself,
        }

    def _check(self, saved: Any) -> None:
        """Raises ValueError if the state is not of such a loader."""
        if not isinstance(saved, dict) or not isinstance(saved.get("facts"), dict):
            raise ValueError(f"expected the state of a ResumableLoader, found a {type(saved)}")
        then, now = saved["facts"], self._facts()
        others = [name for name in now if then.get(name) != now[name]]
        if others:
            changes = ", ".join(f"{name} was {then.get(name)}, is {now[name]}" for name in others)
            raise ValueError(
                f"the loader differs from the saved one ({changes}), so its position would be at "
                "other samples: make the loader as it was, or leave it out of the restore to begin "
                "a new epoch"
            )


def _unique(values: list[Any]) -> list[Any]:
    """Returns each object once."""
    return list({id(value): value for value in values if value is not None}.values())
