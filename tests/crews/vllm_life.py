"""A trainer and a real vLLM in one process, on CPUs: python -m tests.crews.vllm_life DIRECTORY.

Prints, as JSON, what vLLM and the trained model generate after each of some updates, and what a
version without one of the tensors gives.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

import fastckpt
from fastckpt.integrations.vllm import TrainerEngine, TrainerInfo

PROMPT = [1, 5, 9, 33, 2]
LENGTH = 12


class Client:
    """vLLM's methods for a trainer."""

    def __init__(self, engine: LLM) -> None:
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    def start_weight_update(self) -> None:
        self._engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._engine.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engine.finish_weight_update()


def main(directory: str) -> dict[str, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(f"{directory}/base")
    served = LLM(
        model=f"{directory}/base",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        weight_transfer_config=WeightTransferConfig(backend="fastckpt"),
    )

    def generated() -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=LENGTH, detokenize=False)
        prompts = [{"prompt_token_ids": PROMPT}]
        (answer,) = served.generate(prompts, sampling, use_tqdm=False)
        return [*answer.outputs[0].token_ids]

    def expected() -> list[int]:
        ids = torch.tensor([PROMPT])
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        answer = model.generate(ids, max_new_tokens=LENGTH, **options)
        return answer[0, len(PROMPT) :].tolist()

    engine = TrainerEngine.trainer_init(
        TrainerInfo(rank=0, root=f"{directory}/run"), client=Client(served), source=model
    )
    found: dict[str, Any] = {"generated": [generated()], "expected": [expected()], "meanwhile": []}
    for version in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter) * 0.02
        engine.publish(version)
        engine.prepare()
        found["meanwhile"].append(generated())
        engine.send_weights()
        found["generated"].append(generated())
        found["expected"].append(expected())
    engine.source = {
        name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up" not in name
    }
    try:
        engine.send_weights()
    except fastckpt.CheckpointError as error:
        found["refused"] = str(error)
    found["generated"].append(generated())
    engine.shutdown()
    return found


if __name__ == "__main__":
    print("\n" + json.dumps(main(sys.argv[1])))
