"""Frameworks without an integration of their own, on the three ways that the guide "Your framework
is not in the list" gives them: an interrupted run ends with the parameters and the optimizer of an
uninterrupted one, bit for bit.

Each test needs its framework, and says so where that is not installed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fastckpt
from fastckpt.integrations import dcp

pytestmark = pytest.mark.usefixtures("drained")
WORDS = [*"abcdefghij", "<pad>", "<eos>", "<unk>"]
STEPS, EVERY = 8, 2


def rows(number: int, length: int, of: int) -> torch.Tensor:
    return torch.randint(0, of, (number, length), generator=torch.Generator().manual_seed(0))


def test_a_fabric_loop_continues_by_a_checkpointer(
    disk: Path, assert_same: Callable[[Any, Any], None]
) -> None:
    """As LitGPT's: the state is a dict with the model and the optimizer that Fabric wraps."""
    fabric_of = pytest.importorskip("lightning.fabric")

    def train(root: Path, steps: int, seed: int = 3) -> list[Any]:
        torch.manual_seed(seed)
        fabric = fabric_of.Fabric(accelerator="cpu", devices=1)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1)
        )
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        batches = fastckpt.ResumableLoader(DataLoader(data, 4, shuffle=True))
        state = {
            "model": model,
            "optimizer": optimizer,
            "batches": batches,
            "generators": fastckpt.Generators(),
            "iter_num": 0,
        }
        with fastckpt.Checkpointer(root) as checkpointer:
            checkpointer.restore(state)
            while state["iter_num"] < steps:
                fabric.backward(model(next(batches)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                state["iter_num"] += 1
                if state["iter_num"] % EVERY == 0:
                    checkpointer.save(state["iter_num"], state)
        return [dict(model.state_dict()), optimizer.state_dict()]

    data = rows(10, 4, 9).float()
    whole = train(disk / "whole", STEPS)
    train(disk / "cut", STEPS // 2 + 1)  # its last step is not saved
    assert_same(train(disk / "cut", STEPS, seed=4), whole)


def test_a_trainer_of_trl_continues(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl")
    import datasets
    import tokenizers
    import transformers

    from fastckpt.integrations.transformers import AsyncTrainer

    class AsyncSFTTrainer(AsyncTrainer, trl.SFTTrainer):  # type: ignore[misc, name-defined]
        pass

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = tokenizers.models.WordLevel(dict(zip(WORDS, range(13), strict=True)), "<unk>")
    split = tokenizers.Tokenizer(words)
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    text = [" ".join(WORDS[number] for number in row) for row in rows(64, 12, 10).tolist()]

    def make(kind: type, directory: Path, seed: int = 3) -> Any:
        transformers.set_seed(seed)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(
            vocab_size=13, num_attention_heads=4, attention_dropout=0.1, **sizes
        )
        arguments = trl.SFTConfig(
            output_dir=str(directory),
            max_steps=STEPS,
            save_steps=EVERY,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        )
        return kind(
            model=transformers.LlamaForCausalLM(config),
            args=arguments,
            train_dataset=datasets.Dataset.from_dict({"text": text}),
            processing_class=tokenizer,
        )

    def found(trainer: Any) -> list[Any]:
        moments = trainer.optimizer.state_dict()["state"]
        return [*trainer.model.state_dict().values()] + [
            value for number in sorted(moments) for value in moments[number].values()
        ]

    stock = make(trl.SFTTrainer, disk / "stock")
    stock.train()
    make(AsyncSFTTrainer, disk / "run").train()
    files = {path.name for path in (disk / "stock" / "checkpoint-8").iterdir()}
    assert {path.name for path in (disk / "run" / "checkpoint-8").iterdir()} - files == {
        "fastckpt.json"
    }
    for number in (6, 8):
        shutil.rmtree(disk / "run" / f"checkpoint-{number}")
    resumed = make(AsyncSFTTrainer, disk / "run", seed=4)
    resumed.train(resume_from_checkpoint=True)
    pairs = zip(found(resumed), found(stock), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_torchtune_s_distributed_checkpointer_continues(
    disk: Path, monkeypatch: pytest.MonkeyPatch, assert_same: Callable[[Any, Any], None]
) -> None:
    pytest.importorskip("torchtune", exc_type=ImportError)  # it has pins of its own
    from torch.distributed.checkpoint import state_dict as dicts
    from torchtune.models.llama2 import llama2
    from torchtune.training.checkpointing import _checkpointer as theirs

    for name, ours in {
        "async_save": dcp.async_save,
        "save": dcp.save,
        "FileSystemWriter": lambda path, **_given: dcp.Writer(path),
        "FileSystemReader": dcp.Reader,
    }.items():
        monkeypatch.setattr(theirs, name, ours)
    checkpointer = theirs.DistributedCheckpointer(str(disk), str(disk))
    tokens = rows(STEPS * 2, 16, 64)

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = llama2(64, 2, 4, 2, 32, 32)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
        for step in range(first, STEPS):
            logits = model(tokens[2 * step : 2 * step + 2])
            logits.logsumexp(-1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % EVERY == 0:
                model_state, moments = dicts.get_state_dict(model, optimizer)
                state = {"model": model_state, "optimizer": moments, "epochs_run": step + 1}
                checkpointer.save_checkpoint(state, step + 1, save_async=True)
        checkpointer._checkpoint_future.result()

    torch.manual_seed(3)
    whole = make()
    train(*whole, 0)
    for number in (6, 8):
        shutil.rmtree(disk / f"dist_epoch_{number}")
    torch.manual_seed(4)
    resumed = make()
    model_state, moments = dicts.get_state_dict(*resumed)
    state = {"model": model_state, "optimizer": moments, "epochs_run": 0}
    checkpointer.load_checkpoint(state)
    dicts.set_state_dict(*resumed, model_state_dict=model_state, optim_state_dict=moments)
    assert state["epochs_run"] == 4
    train(*resumed, state["epochs_run"])
    for ours, expected in zip(resumed, whole, strict=True):
        assert_same(dict(ours.state_dict()), dict(expected.state_dict()))
