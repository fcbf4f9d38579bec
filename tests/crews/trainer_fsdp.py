"""One rank of a job under Trainer's FSDP2, which saves checkpoints and goes on with one.

Responsible for telling the losses. Must not know what they should be.

trainer_fsdp.py save|load DIRECTORY
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from fastckpt.integrations.transformers import AsyncTrainer
from tests.crews.save_or_load import main

CONTEXT, EVERY, STEPS = 8, 1, 2
KINDS = {"stock": Trainer, "ours": AsyncTrainer}


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        window = torch.arange(number, number + CONTEXT)
        return {"input_ids": window, "labels": window}


def make(
    kind: type[Trainer], directory: str, saves: bool, states: str = "SHARDED_STATE_DICT"
) -> Any:
    set_seed(3)
    sizes = {"vocab_size": 80, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 1, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=STEPS,
        save_steps=EVERY,
        save_strategy="steps" if saves else "no",
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "state_dict_type": states,
            "transformer_layer_cls_to_wrap": ["GPT2Block"],
        },
    )
    # torch has FSDP2 for the CPU; Accelerate offers it on other devices alone.
    PartialState().distributed_type = DistributedType.MULTI_GPU
    return kind(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Windows())


def train(kind: type[Trainer], directory: str, resume_from: str | None = None) -> list[str]:
    """The losses of a run."""
    trainer = make(kind, directory, resume_from is None)
    trainer.train(resume_from_checkpoint=resume_from)
    return [entry["loss"].hex() for entry in trainer.state.log_history if "loss" in entry]


def save(directory: str) -> dict[str, Any]:
    whole = {name: train(kind, f"{directory}/{name}") for name, kind in KINDS.items()}
    try:
        make(AsyncTrainer, directory, True, "FULL_STATE_DICT")
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    again = train(Trainer, f"{directory}/again", f"{directory}/ours/checkpoint-{EVERY}")
    return {"whole": whole, "again": again, "refusal": refusal}


def load(directory: str) -> dict[str, Any]:
    return {
        name: train(kind, f"{directory}/again", f"{directory}/{name}/checkpoint-{EVERY}")
        for name, kind in KINDS.items()
    }


main(save, load)
