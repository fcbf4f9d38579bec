"""A torchtitan Trainer of a small model, as far as checkpoints see it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

import fastckpt
from fastckpt.integrations.torchtitan import FastckptCheckpointer

LR = LRSchedulersContainer.Config(warmup_steps=2)


class Loader:
    """A dataloader as torchtitan's, which keys its state by its data-parallel rank."""

    def __init__(self, dp_rank: int = 0) -> None:
        self.key, self.at, self.dp_world_size = f"dp_rank_{dp_rank}", 0, 2

    def state_dict(self) -> dict[str, Any]:
        return {self.key: str(self.at).encode(), "world_size": self.dp_world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.key in state:  # else torchtitan's only warn
            assert state["world_size"] == self.dp_world_size, "dp_degree is inconsistent"
            self.at = int(state[self.key])


class Step:
    """The Trainer, as far as it is saved."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Adapter:
    """Names for Hugging Face; a copy of the weight, as adapters make where they permute rows."""

    fqn_to_index_mapping = None

    def __init__(self, assets: Path | None = None) -> None:
        self.hf_assets_path = None if assets is None else str(assets)
        self.quantized: list[bool] = []

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": value.flip(0) for name, value in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): value.flip(0) for name, value in state.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        self.quantized.append(from_quantized)
        return HuggingFaceStorageReader(path)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(300, 900))  # large enough for a shard
        self.bias = nn.Parameter(torch.rand(300))
        self.register_buffer("frequencies", torch.rand(9), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.weight, self.bias)


class Run:
    """A model with all that a Trainer saves, and a manager of it in `folder`. With `parts` the
    model is these, as a pipeline's ranks have them.
    """

    def __init__(
        self,
        disk: Path,
        *,
        kind: Any = FastckptCheckpointer,
        adapter: Adapter | None = None,
        dp_rank: int = 0,
        model: type[Model] = Model,
        parts: Sequence[nn.Module] = (),
        **settings: Any,
    ) -> None:
        self.parts = list(parts) or [model()]
        self.model: Any = self.parts[0]
        self.loader, self.trainer = Loader(dp_rank), Step()
        self.optimizers = default_adamw().build(model_parts=self.parts)
        self.schedulers = LR.build(optimizers=self.optimizers, training_steps=10)
        folder = str(settings.get("folder", "run"))
        self.folder: Any = folder if "://" in folder else disk / folder
        plain = {"enable": True, "interval": 1, "folder": "run", "last_save_model_only": False}
        self.checkpointer = kind.Config(**(plain | settings)).build(
            dataloader=self.loader,
            model_parts=self.parts,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.trainer},
            sd_adapter=adapter,
            base_folder=str(disk),
        )

    def train(self, last: int = 1) -> None:
        while self.trainer.step < last:
            self.trainer.step += 1
            self.loader.at += 2
            self.model(torch.ones(2, 900)).square().sum().backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.checkpointer.save(self.trainer.step)

    def state(self) -> dict[str, Any]:
        return {
            "model": {name: value.clone() for name, value in self.model.state_dict().items()},
            "optimizer": {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in self.optimizers.state_dict().items()
            },
            "rest": [self.schedulers.state_dict(), self.loader.at, self.trainer.step],
        }

    def steps(self) -> list[int]:
        self.checkpointer.maybe_wait_for_saving()
        return fastckpt.Checkpointer(self.folder).steps()
