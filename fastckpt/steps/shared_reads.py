"""Restoring what all ranks hold alike: each reads a share from storage, and they pass it on among
GPUs, which are faster at that than any file system.

Responsible for who reads what and for the broadcasts. It must not know files, or which step it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from fastckpt.errors import PeerFailed
from fastckpt.plan.boxes import Box, Held, plan
from fastckpt.ranks.round import Round
from fastckpt.saving.fence import named_tensors
from fastckpt.state.dtensors import PLAIN_TENSORS
from fastckpt.state.targets import Place, Target


class Spread:
    """One restore's sharing of reads; every rank makes one, with a state of its own.

    Nothing is shared unless all states have the same tensors on devices that the group broadcasts
    among. Then all ranks find the same targets in a step, without another word.

    Args:
        agreement: of the restore.
        group: a torch.distributed process group, or None.
        state: what is restored.
    """

    def __init__(self, agreement: Round, group: Any, state: object) -> None:
        self._group = group
        self._rank, self._ranks = agreement.rank, agreement.world_size
        self._kind = None if group is None or self._ranks == 1 else kind_of(group)
        self._held: list[Held] = []
        self._tensors: list[torch.Tensor] = []
        if self._kind is not None:
            text = repr([_described(*item) for item in named_tensors(state)]).encode()
            digest = hashlib.sha256(text).digest()
            if agreement.same("restored", digest, lambda: b"") is not None:
                self._kind = None

    def mine(
        self,
        targets: Sequence[Target],
        find: Callable[[Sequence[Place]], dict[str, torch.dtype]],
    ) -> list[Target]:
        """Returns those of them that this rank reads.

        Args:
            targets: of one step; equal on all ranks where they are shared.
            find: dtypes of what the step holds.
        """
        self._held, self._tensors = [], []
        if self._kind is None:
            return list(targets)
        stored = find([(target.key, target.shape, target.box) for target in targets])
        others, everybody = [], tuple(range(self._ranks))
        for target in targets:
            tensor = target.tensor.detach()
            whole = Box((0,) * len(target.shape), target.shape)
            if target.box != whole or not self._is_shared(tensor, stored.get(target.key)):
                others.append(target)
                continue
            item = Held(target.key, tensor.element_size(), target.shape, whole, everybody)
            self._held.append(item)
            self._tensors.append(tensor)
        for piece in plan(self._held, self._rank):
            item, tensor = self._held[piece.held], self._tensors[piece.held]
            run = tensor.view(-1)[piece.begin : piece.begin + piece.box.numel]
            others.append(Target(item.key, run.view(piece.box.sizes), item.shape, piece.box))
        return others

    def _is_shared(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
        plain = type(tensor) in PLAIN_TENSORS and tensor.device.type == self._kind
        as_it_lies = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        return plain and as_it_lies and tensor.numel() > 0 and tensor.dtype == dtype

    def pass_on(self) -> None:
        """Gives every rank what the others have read; called when all of them have.

        Raises:
            PeerFailed: a rank is gone. The state was partly overwritten.
        """
        if not self._held:
            return
        # Before the first byte, as in StepReader.
        increment_version([t for t in self._tensors if not t.is_inference()])
        under_way = []
        try:
            for rank in range(self._ranks):
                source = dist.get_global_rank(self._group, rank)
                for piece in plan(self._held, rank):
                    flat = self._tensors[piece.held].view(-1)
                    run = flat[piece.begin : piece.begin + piece.box.numel]
                    under_way.append(dist.broadcast(run, source, group=self._group, async_op=True))
            for work in under_way:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise PeerFailed(
                f"a rank is gone while ranks passed on what they had read ({reason}); the state "
                "was partly overwritten"
            ) from error


def kind_of(group: Any) -> str | None:
    """The type of devices among which a group broadcasts faster than files are read."""
    return "cuda" if "nccl" in dist.get_backend(group) else None


def _described(name: str, tensor: torch.Tensor) -> tuple[str, ...]:
    # What decides on sharing; sizes of other kinds of tensors may be unknown as yet.
    if type(tensor) not in PLAIN_TENSORS:
        return name, type(tensor).__name__
    layout = f"{tensor.is_contiguous()} {tensor.is_neg()} {tensor.is_conj()}"
    return name, str(tensor.dtype), str(tuple(tensor.shape)), tensor.device.type, layout
