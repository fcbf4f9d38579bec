"""Shared restores of tensors that all ranks hold in full: each rank reads a share from storage and
broadcasts it to the other GPUs, which is faster than reading it from any file system.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fastckpt.engine.broadcast_read_stream import device_of
from fastckpt.errors import PeerFailed
from fastckpt.plan.boxes import Held, plan, whole
from fastckpt.ranks import same_state
from fastckpt.ranks.round import Round
from fastckpt.saving.mutation_check import named_tensors
from fastckpt.state.kinds import PLAIN_TENSORS
from fastckpt.state.targets import Place, Target, note_overwritten


class Spread:
    """The sharing of reads in one restore. Every rank creates one for its own state.

    Reads are shared only if all states have the same tensors, on devices that the group broadcasts
    among, and the same `fit`, which is a text of the arguments that choose the tensors to restore.
    All ranks then find the same targets in a step, without further communication.
    """

    def __init__(self, agreement: Round, group: Any, state: object, fit: str) -> None:
        self._group = group
        self._rank, self._ranks = agreement.rank, agreement.world_size
        self._kind = None if group is None or self._ranks == 1 else kind_of(group)
        self._items: list[Held] = []
        self._tensors: list[torch.Tensor] = []
        if self._kind is not None:
            text = repr([fit, *(_described(*item) for item in named_tensors(state))])
            digest = hashlib.sha256(text.encode()).digest()
            if same_state.same(agreement, "restored", digest, lambda: b"") is not None:
                self._kind = None

    def mine(
        self,
        targets: Sequence[Target],
        find: Callable[[Sequence[Place]], dict[str, torch.dtype]],
    ) -> list[Target]:
        """Returns the targets that this rank reads from a step: all targets that are not shared,
        and its share of the others. `find` is StepReader.find.
        """
        self._items, self._tensors = [], []
        if self._kind is None:
            return list(targets)
        stored = find([target.place for target in targets])
        others, everybody = [], tuple(range(self._ranks))
        for target in targets:
            tensor = target.tensor.detach()
            everything = whole(target.shape)
            if target.box != everything or not self._is_shared(tensor, stored.get(target.key)):
                others.append(target)
                continue
            item = Held(target.key, tensor.element_size(), target.shape, everything, everybody)
            self._items.append(item)
            self._tensors.append(tensor)
        for piece in plan(self._items, self._rank):
            item, tensor = self._items[piece.held], self._tensors[piece.held]
            run = tensor.view(-1)[piece.begin : piece.begin + piece.box.numel]
            part = run.view(piece.box.sizes)
            others.append(Target(item.key, tensor.dtype, item.shape, piece.box, part))
        return others

    def _is_shared(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
        plain = type(tensor) in PLAIN_TENSORS and tensor.device.type == self._kind
        as_it_lies = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        return plain and as_it_lies and tensor.numel() > 0 and tensor.dtype == dtype

    def pass_on(self) -> None:
        """Broadcasts each rank's share to the other ranks, after all ranks have read their shares.
        If a rank has failed, raises PeerFailed; the state is then partly overwritten.
        """
        if not self._items:
            return
        note_overwritten(self._tensors)
        under_way = []
        try:
            for rank in range(self._ranks):
                source = dist.get_global_rank(self._group, rank)
                for piece in plan(self._items, rank):
                    flat = self._tensors[piece.held].view(-1)
                    run = flat[piece.begin : piece.begin + piece.box.numel]
                    under_way.append(dist.broadcast(run, source, group=self._group, async_op=True))
            for work in under_way:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise PeerFailed(
                f"a rank failed while ranks sent each other the tensors that they had read "
                f"({reason}); the state was partly overwritten"
            ) from error


def kind_of(group: Any) -> str | None:
    """Returns the device type of a group whose broadcasts are faster than reads of files; else
    None.
    """
    kind = device_of(group).type
    return None if kind == "cpu" else kind


def _described(name: str, tensor: torch.Tensor) -> tuple[str, ...]:
    # Only plain tensors are shared; the sizes of others may not be known yet.
    if type(tensor) not in PLAIN_TENSORS:
        return name, type(tensor).__name__
    layout = f"{tensor.is_contiguous()} {tensor.is_neg()} {tensor.is_conj()}"
    return name, str(tensor.dtype), str(tuple(tensor.shape)), tensor.device.type, layout
