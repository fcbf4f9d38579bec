"""A checkpoint engine "fastckpt" for verl: the actor publishes versions of its weights, and the
rollout workers read them, verified.

    rollout.checkpoint_engine.custom_backend_module=fastckpt.integrations.verl
    rollout.checkpoint_engine.backend=fastckpt
    +rollout.checkpoint_engine.engine_kwargs.fastckpt.root=s3://bucket/policy

Responsible for the interface in verl/checkpoint_engine/base.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from fastckpt import WeightPublisher, WeightSubscriber, WeightUpdate

try:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache
except ImportError as error:
    raise ImportError(f"{__name__} needs verl 0.9 or newer: {error}") from error


@CheckpointEngineRegistry.register("fastckpt")
class Engine(CheckpointEngineWithCache):  # type: ignore[misc]
    """The engine of one actor or rollout worker. verl gives each actor rank whole tensors, so the
    master alone publishes them. A rollout worker holds one host copy of the weights.

    Args:
        bucket_size: verl's; not needed.
        is_master: whether this is the first actor rank.
        root, storage_options: as WeightPublisher's.
        timeout_s: for how long a rollout worker waits for a version.
        publisher: further arguments of WeightPublisher, such as keep and full_every.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        root: str,
        storage_options: dict[str, Any] | None = None,
        timeout_s: float = 600.0,
        **publisher: Any,
    ) -> None:
        self._is_master, self._timeout_s = is_master, timeout_s
        self._root, self._storage_options, self._options = root, storage_options, publisher
        self._publisher: WeightPublisher | None = None
        self._subscriber: WeightSubscriber | None = None
        self._version = -1
        self._before: str | None = None  # the nonce of the newest version before the sync

    def prepare(self) -> dict[str, Any]:
        """Notes the newest version: an earlier run on the same root may have published one with the
        number that comes next. verl calls this on all workers before it sends.
        """
        self._before = self._reader().newest()
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """No worker connects to another one."""
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        """Nothing to do."""

    def finalize(self) -> None:
        """Nothing to do: the copies in host memory serve the next version."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publishes the weights as the version `global_steps`; None: the next one. Returns when it
        is committed, with the metrics of the sync. All actor ranks call it, since the weights may
        be gathered from all of them.
        """
        tensors = dict[str, torch.Tensor]()
        for name, tensor in weights:
            if self._is_master:
                tensors[name] = tensor.detach().to("cpu", copy=True)
        if not self._is_master:
            return {}
        if self._publisher is None:
            alone = None
            if dist.is_initialized():
                mine = [dist.get_rank()]
                alone = dist.new_group(mine, backend="gloo", use_local_synchronization=True)
            self._publisher = WeightPublisher(
                self._root, storage_options=self._storage_options, group=alone, **self._options
            )
        self._version = self._version + 1 if global_steps is None else global_steps
        handle = self._publisher.publish(tensors, self._version)
        stats = await asyncio.wrap_future(handle)
        return {"checkpoint_engine/payload_mbytes": (stats.stored_nbytes or 0) / 1e6}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Waits for the version `global_steps`, or any, that was committed after prepare(), and
        yields its tensors when all of it is verified. Raises as WeightSubscriber.wait_for.
        """
        update = await asyncio.to_thread(
            self._reader().wait_for, global_steps, after=self._before, timeout_s=self._timeout_s
        )
        for name, tensor in self._on_device(update):
            yield name, tensor

    def _reader(self) -> WeightSubscriber:
        if self._subscriber is None:
            self._subscriber = WeightSubscriber(self._root, storage_options=self._storage_options)
        return self._subscriber

    def _on_device(self, update: WeightUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        accelerator = torch.accelerator.current_accelerator()
        for name, tensor in update:  # what verl sends by CUDA IPC has to be on the device
            yield name, tensor if accelerator is None else tensor.to(accelerator)

    def close(self) -> None:
        """Waits for the version in flight, and frees the host memory. verl does not call this; its
        workers end as processes.
        """
        for each in (self._publisher, self._subscriber):
            if each is not None:
                each.close()
        self._publisher = self._subscriber = None

    async def get_weights(self) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yields the newest version. Raises as WeightSubscriber.wait_for."""
        for name, tensor in self._on_device(await asyncio.to_thread(self._reader().wait_for)):
            yield name, tensor
