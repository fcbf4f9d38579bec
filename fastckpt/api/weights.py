"""WeightPublisher: a trainer publishes versions of a model, which lazy/weights.py reads.

A version is a step of a Checkpointer. Its shards are stored in full, or as the difference from the
version before (steps/snapshot.py); every reader of steps follows such a chain.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fastckpt.api.checkpointer import Checkpointer
from fastckpt.arguments.checks import check_count, check_deadline
from fastckpt.arguments.environment import Memory
from fastckpt.arguments.options import SaveOptions
from fastckpt.arguments.urls import StorageOptions
from fastckpt.lazy.weights import check_dtype, named
from fastckpt.saving.handle import SaveHandle
from fastckpt.state.fit import Rename
from fastckpt.steps.snapshot import Snapshot


class Versions(Checkpointer):
    """A Checkpointer whose steps are differences from the step before, where that is possible.

    Args:
        form: returns the tensors to save of a state.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        form: Callable[[Any], dict[str, torch.Tensor]],
        full_every: int,
        keep_s: float,
        **arguments: Any,
    ) -> None:
        super().__init__(root, **arguments)
        self._form = form
        if self._tier is not None:
            self._tier.needs_each_step = False  # nobody asks for a version after a newer one
        self.snapshot = Snapshot(full_every)
        self._options = replace(self._options, snapshot=self.snapshot, keep_s=keep_s)

    def _saved_form(self, state: Any) -> dict[str, torch.Tensor]:
        return self._form(state)


class WeightPublisher:
    """Publishes versions of a model's weights, each complete or not there, from all ranks that hold
    them.

    Each rank writes the elements that it holds; no rank gathers the model. A version is stored in
    full, or as the difference from the version before, bytes by XOR and compressed without loss.
    For that, each rank keeps its part of the version that was published last in host memory: one
    copy in the published dtype. Every rank of the group makes a WeightPublisher with the same
    arguments and calls publish() in the same order. A second publisher to the same root is refused
    (RootInUse).

    Args:
        root: the directory of the versions, or its URL; as Checkpointer's.
        keep: how many of the newest versions stay, at least 1, and all that these are differences
            from.
        full_every: every so many versions, at least 1, one is stored in full, as is the first one
            of a publisher, one after a failed save, one whose tensors differ from the version
            before, and one after a difference that took more than half of the full size.
        keep_s: the least age in seconds at which a version is removed. On file systems a version
            also stays while a subscriber reads it; buckets have no locks, so give readers time.
        dtype: the dtype of tensors of floating-point numbers; None: their own. Tensors of another
            dtype are converted in publish().
        rename, only: as fastckpt.export's.
        local: a Memory in which versions are committed first, as Checkpointer's; a WeightSubscriber
            with `local` on the same nodes reads them there. It must have root_every=1. The next
            version is staged when this one is in the root.
        group, options, storage_options: as Checkpointer's.

    Raises:
        ValueError, TypeError: as Checkpointer, and for a full_every below 1, a root_every above 1
            or a dtype that safetensors files cannot hold.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: int = 4,
        full_every: int = 16,
        keep_s: float = 0.0,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
        only: str | None = None,
        local: Memory | None = None,
        group: Any = None,
        options: SaveOptions = SaveOptions(),
        storage_options: StorageOptions | None = None,
    ) -> None:
        check_dtype(dtype)
        if local is not None and not isinstance(local, Memory):
            raise TypeError(f"local is {local!r}, must be a fastckpt.Memory")
        if local is not None and local.root_every != 1:
            raise ValueError(f"local has root_every={local.root_every}, must be 1")
        self._versions = Versions(
            root,
            lambda state: named(state, dtype, rename, only),
            check_count("full_every", full_every),
            check_deadline("keep_s", keep_s),
            keep_last=check_count("keep", keep),
            local=local,
            group=group,
            options=options,
            storage_options=storage_options,
        )

    def publish(
        self, state: Any, version: int, *, metrics: Mapping[str, Any] | None = None
    ) -> SaveHandle:
        """Begins to publish a version. All ranks call it, with the same version.

        Args:
            state: a module, a state dict, or a nest of these, as fastckpt.export's: tensors and
                DTensors are published under the names that they have in the model; the rest is
                left out.
            version: its number, 0 or more. Readers take the version that was committed last,
                whatever its number.
            metrics: as Checkpointer.save's.

        Returns:
            A SaveHandle, whose result() returns when the version is committed on all ranks. Saves
            of one publisher follow each other: the next one is staged when this one has ended.

        Raises:
            As Checkpointer.save; ValueError if two tensors get the same name, or none is left;
                TypeError if a tensor is none that safetensors files can hold. If one rank raises
                one of these, result() raises PeerFailed on the others.
        """
        return self._versions.save(version, state, metrics=metrics)

    def close(self) -> None:
        """Waits for the versions in flight, and raises the first error that nobody has asked for;
        as Checkpointer.close().
        """
        self._versions.close()
        self._versions.snapshot.clear()

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._versions.__exit__(*exception)
