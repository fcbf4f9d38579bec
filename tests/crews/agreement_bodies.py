"""What each rank does in the tests of what integrations do while a save is agreed on.

Responsible for one small save by each integration, on ranks of one job, for the watch over
collectives meanwhile, and for a disk that fails one rank. It must not know what should come of it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fastckpt import SaveOptions
from fastckpt.ranks.coordinator import Coordinator
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle
from tests.crews.group_crew import Member, attempt
from tests.kit.doubles import FailAt, file_size_limit, process_on

TIMEOUT_S = 30.0
COLLECTIVES = (
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "_reduce_scatter_base",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
Wait = Callable[[], object]
Save = Callable[[str], Wait]  # begins a save to a path; what it returns waits for the outcome


class Watch:
    """Has every collective raise, on each thread, from the moment at which a round begins until
    the block ends.

    Attributes:
        begun: the names of collectives that somebody was about to begin.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._is_armed = False
        self._counts: list[int] = []

    def __enter__(self) -> Watch:
        self._patches = contextlib.ExitStack()
        for name in COLLECTIVES:
            real = getattr(dist.ProcessGroup, name)
            self._patches.enter_context(
                mock.patch.object(dist.ProcessGroup, name, self._refusing(name, real))
            )
        begin = Coordinator.begin

        def arming(*args: Any, **options: Any) -> Any:
            if not self._is_armed:
                self._counts = self._numbers()
                self._is_armed = True
            return begin(*args, **options)

        self._patches.enter_context(mock.patch.object(Coordinator, "begin", arming))
        return self

    def __exit__(self, *_: object) -> None:
        # What is called in C++ alone, as the collectives of DTensors are, has counted.
        if self._is_armed and self._numbers() != self._counts:
            self.begun.append("a collective in C++")
        self._patches.close()

    def _refusing(self, name: str, real: Any) -> Any:
        def refusing(*args: Any, **options: Any) -> Any:
            if self._is_armed:
                self.begun.append(f"{name} on {threading.current_thread().name}")
                raise RuntimeError(f"{name} is a collective between begin and conclude")
            return real(*args, **options)

        return refusing

    @staticmethod
    def _numbers() -> list[int]:
        """How many collectives each group of this process has begun."""
        groups = list(dist.distributed_c10d._world.pg_map)
        return [group._get_sequence_number_for_group() for group in groups]


class Told(NamedTuple):
    """What one rank has to tell of a save: its error, and the collectives that were begun."""

    error: str
    begun: list[str]


def save(
    member: Member, root: str, kind: str, name: str, fails: int = -1, code: int | None = None
) -> Told:
    """Saves once to `name` below root, which one rank cannot that `fails`: each of its operations
    fails with an error number or, if there is none, no file of it may have a byte.
    """
    begin, is_it = _prepared(member, root, kind), fails == member.rank
    double = FailAt(0, code, lasting=True) if is_it and code else None
    limit = 0 if is_it and not code else None
    with process_on(double), Watch() as watch, file_size_limit(limit):
        error = attempt(lambda: begin(os.path.join(root, name))()).error
    dist.barrier()  # all ranks come here, and none has begun a collective that others have not
    return Told("" if error is None else f"{type(error).__name__}: {error}", watch.begun)


def save_where_one_rank_sees_it(member: Member, root: str) -> str | None:
    """The error of an automatic save of Accelerate's whose directory exists, as rank 1 sees it."""
    _launch(member)
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from fastckpt.integrations.accelerate import save_state

    exists = os.path.exists

    def seen(path: Any) -> bool:
        return exists(path) or (member.rank == 1 and str(path).endswith("checkpoint_0"))

    project = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    with mock.patch("os.path.exists", seen):
        outcome = attempt(
            lambda: save_state(accelerator, options=SaveOptions(timeout_s=TIMEOUT_S)).result()
        )
    pipeline.current().drain()
    return None if outcome.error is None else str(outcome.error)


_prepared_saves: dict[str, Save] = {}


def _prepared(member: Member, root: str, kind: str) -> Save:
    if kind not in _prepared_saves:
        _launch(member)
        _prepared_saves[kind] = KINDS[kind](root)
    return _prepared_saves[kind]


def _launch(member: Member) -> None:
    """Sets what a launcher does, which frameworks look at."""
    os.environ.update(
        RANK=str(member.rank),
        LOCAL_RANK=str(member.rank),
        WORLD_SIZE=str(member.world_size),
        LOCAL_WORLD_SIZE=str(member.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))


def _sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _layers()
    fully_shard(model, mesh=DeviceMesh("cpu", [*range(dist.get_world_size())]))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    return model, optimizer


def _dcp(_root: str) -> Save:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.stateful import Stateful

    from fastckpt.integrations import dcp

    model, optimizer = _sharded()

    class Gathering(Stateful):
        """State that torch may gather, as applications pass it to torch's own async_save."""

        def state_dict(self) -> dict[str, Any]:
            dist.barrier()
            return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Is not called."""

    state = {"app": Gathering()}

    def begin(path: str) -> Wait:
        return dcp.async_save(
            state, checkpoint_id=path, options=SaveOptions(timeout_s=TIMEOUT_S)
        ).result

    return begin


def _torchtitan(_root: str) -> Save:
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from fastckpt.integrations.torchtitan import FastckptCheckpointer

    model, _ = _sharded()
    optimizers = default_adamw().build(model_parts=[model])
    optimizers.step()
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=10
    )

    def begin(path: str) -> Wait:
        checkpointer = FastckptCheckpointer.Config(
            enable=True,
            interval=1,
            folder=path,
            options=SaveOptions(fence="step", timeout_s=TIMEOUT_S),
        ).build(
            dataloader=None,
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={},
            sd_adapter=None,
        )

        def wait() -> None:
            with contextlib.closing(checkpointer):
                checkpointer.maybe_wait_for_saving()

        checkpointer.save(1)
        return wait

    return begin


def _accelerate(_root: str, fsdp: bool = False) -> Save:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    from fastckpt.integrations.accelerate import save_state

    plugin = None
    if fsdp:  # which Accelerate offers on other devices alone
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="SIZE_BASED_WRAP",
            min_num_params=100,
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = _layers()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 16)).sum())
    optimizer.step()

    def begin(path: str) -> Wait:
        return save_state(accelerator, path, options=SaveOptions(timeout_s=TIMEOUT_S)).result

    return begin


def _lightning(root: str) -> Save:
    from lightning.pytorch import LightningModule, Trainer

    from fastckpt.integrations.lightning import FastckptCheckpointIO, FastckptModelParallelStrategy

    model, optimizer = _sharded()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def configure_model(self) -> None:
            """It is sharded already."""

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        def training_step(self, _batch: Any, _number: int) -> torch.Tensor:
            loss: torch.Tensor = self.layers(torch.ones(2, 16)).sum()
            return loss

    plugin = FastckptCheckpointIO()
    ranks = dist.get_world_size()
    trainer = Trainer(
        strategy=FastckptModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        plugins=[plugin],
        max_steps=1,
        accelerator="cpu",
        devices=ranks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=root,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(range(8)))
    checkpoint = trainer._checkpoint_connector.dump_checkpoint()

    def begin(path: str) -> Wait:
        trainer.strategy.save_checkpoint({**checkpoint}, path)
        return plugin.teardown

    return begin


def steps_of_calls(member: Member, root: str) -> list[int]:
    """The steps in which a Trainer calls on_save, where rank 1 learns late that saves have ended.

    Only the Trainer's thread does: if a save's own thread did, it would end the save twice, and
    not wait for the removal of older checkpoints.
    """
    from transformers import TrainerCallback

    called: list[int] = []

    class Notes(TrainerCallback):  # type: ignore[misc]
        def on_save(self, *_args: Any, **_named: Any) -> None:
            called.append(trainer.state.global_step)

        def on_step_end(self, *_args: Any, **_named: Any) -> None:
            pipeline.current().drain()

    _launch(member)
    trainer = _trainer(root, max_steps=6, save_steps=2, callbacks=[Notes()])
    training, done = threading.get_ident(), InnerHandle.done

    def done_late(handle: InnerHandle) -> bool:
        return threading.get_ident() != training and done(handle)

    late = mock.patch.object(InnerHandle, "done", done_late)
    with late if member.rank else contextlib.nullcontext():
        trainer.train()
    return called


def file_that_a_trainer_cannot_write(member: Member, root: str) -> list[str]:
    """What a save raises, of which rank 1 cannot write a file, and then the end of training."""
    _launch(member)
    trainer = _trainer(root, max_steps=1, save_strategy="no")
    trainer.train()
    with file_size_limit(100 if member.rank else None):
        saving = attempt(lambda: trainer._save_checkpoint(trainer.model, None)).error
        ended = attempt(trainer.wait_for_checkpoints).error
    return [str(saving), str(ended)]


def _transformers(root: str) -> Save:
    trainer = _trainer(root, max_steps=1, save_strategy="no")
    trainer.train()
    trainer.state.best_global_step = 1

    def begin(path: str) -> Wait:
        trainer.args.output_dir = path
        trainer.current_flos = 1.0  # which ranks add up
        trainer._save_checkpoint(trainer.model, None)
        return trainer.wait_for_checkpoints

    return begin


def _trainer(root: str, callbacks: Any = (), **arguments: Any) -> Any:
    import tqdm
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from fastckpt.integrations.transformers import AsyncTrainer

    tqdm.tqdm.monitor_interval = 0  # else it has a thread that never ends
    sizes = {"vocab_size": 80, "n_positions": 8, "n_embd": 32, "n_layer": 1, "n_head": 2}
    how = TrainingArguments(
        output_dir=root, report_to=[], disable_tqdm=True, use_cpu=True, **arguments
    )
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 64
    return AsyncTrainer(
        model=GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
        args=how,
        train_dataset=rows,
        callbacks=[*callbacks],
        options=SaveOptions(timeout_s=TIMEOUT_S),
    )


def _deepspeed(_root: str) -> Save:
    from tests.crews import deepspeed_bodies

    engine, saving = deepspeed_bodies.installed(2, timeout_s=TIMEOUT_S)
    deepspeed_bodies.train(engine, 0, 1)

    def begin(path: str) -> Wait:
        engine.save_checkpoint(path, "tag")
        return saving.wait

    return begin


def _megatron(_root: str) -> Save:
    from fastckpt.integrations import megatron
    from tests.crews import megatron_bodies

    model = megatron_bodies.on_the_cpu(megatron_bodies.ready)(1, 1)

    def begin(path: str) -> Wait:
        with megatron_bodies.on_cpu():
            return megatron.save_checkpoint(
                1, *model, save=path, options=SaveOptions(timeout_s=TIMEOUT_S)
            ).result

    return begin


def _strategy(_root: str) -> Save:
    import megatron.core.dist_checkpointing as mdc

    from fastckpt.integrations import megatron
    from tests.crews import megatron_bodies

    def begin(path: str) -> Wait:
        state = megatron_bodies.small_state(dist.get_rank(), 1.0)
        strategy = megatron.SaveStrategy(options=SaveOptions(timeout_s=TIMEOUT_S))
        Path(path).mkdir(exist_ok=True)
        with megatron_bodies.on_cpu():
            request = mdc.save(state, path, strategy, async_sharded_save=True)
        return request.finalize_fns[0]

    return begin


KINDS: dict[str, Callable[[str], Save]] = {
    "dcp": _dcp,
    "megatron": _megatron,
    "megatron strategy": _strategy,
    "transformers": _transformers,
    "accelerate": _accelerate,
    "accelerate FSDP": partial(_accelerate, fsdp=True),
    "lightning": _lightning,
    "deepspeed": _deepspeed,
    "torchtitan": _torchtitan,
}
