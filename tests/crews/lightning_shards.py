"""One rank of a fit under Lightning's ModelParallelStrategy, with FSDP2.

Responsible for telling the losses. Must not know what they should be.

lightning_shards.py save|load DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch
import torch
import torch.distributed.checkpoint.state_dict as torch_states
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard

from fastckpt.integrations.lightning import FastckptCheckpointIO, FastckptModelParallelStrategy

STEPS, RESUMED_AT, RANKS = 3, 2, int(os.environ["WORLD_SIZE"])
KINDS: dict[str, Any] = {"stock": ModelParallelStrategy, "ours": FastckptModelParallelStrategy}


class Model(lightning.pytorch.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4))
        self.losses: list[str] = []

    def configure_model(self) -> None:
        if not isinstance(self.layers, FSDPModule):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, _batch: Any, _number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.global_step)
        loss: torch.Tensor = self.layers(torch.randn(4, 16, generator=generator)).pow(2).mean()
        self.losses.append(loss.item().hex())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(kind: str, directory: Path, resume_from: Path | None = None) -> list[str]:
    os.environ["WORLD_SIZE"] = str(RANKS)  # which Lightning removes after each fit
    callback = ModelCheckpoint(
        directory, "{step}", every_n_train_steps=1, monitor="step", mode="max", save_top_k=2
    )
    trainer = lightning.pytorch.Trainer(
        strategy=KINDS[kind](data_parallel_size=RANKS, tensor_parallel_size=1),
        plugins=[FastckptCheckpointIO()] if kind == "ours" else [],
        callbacks=[callback],
        max_steps=STEPS,
        accelerator="cpu",
        devices=RANKS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(range(1000)), ckpt_path=resume_from)
    return model.losses


def save(directory: Path) -> dict[str, Any]:
    """The losses of each kind, and how often a strategy made torch copy a state to the host."""
    told: dict[str, Any] = {}
    for kind in KINDS:
        copy = torch_states._offload_state_dict_to_cpu
        with mock.patch.object(torch_states, copy.__name__, side_effect=copy) as copied:
            told[kind] = fit(kind, directory / kind)
        told[f"copies of {kind}"] = copied.call_count
    return told


def load(directory: Path) -> dict[str, Any]:
    return {
        f"{of} by {kind}": fit(
            kind, directory / "again", directory / of / f"step={RESUMED_AT}.ckpt"
        )
        for of, kind in (("stock", "stock"), ("ours", "stock"), ("ours", "ours"))
    }


def main() -> None:
    torch.set_num_threads(1)
    told = (save if sys.argv[1] == "save" else load)(Path(sys.argv[2]))
    Path(f"told {os.environ['RANK']}").write_text(json.dumps(told))


main()
