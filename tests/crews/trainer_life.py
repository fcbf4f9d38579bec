"""One rank of a Trainer whose second rank cannot write its part of one checkpoint.

torchrun --nproc-per-node 2 trainer_life.py OUTPUT_DIR
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import transformers_trainer as example
from train_gpt import load_text
from transformers import TrainingArguments

from fastckpt.integrations.transformers import AsyncTrainer

FAILS_AT, EVERY, STEPS = 4, 2, 6


class Unlucky(AsyncTrainer):
    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.process_index == 1 and self.state.global_step == FAILS_AT:
            raise OSError("no room for this rank")
        super()._save_rng_state(output_dir)


def main() -> None:
    logging.basicConfig(format="%(process)d %(name)s %(message)s")
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        max_steps=STEPS,
        save_steps=EVERY,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Unlucky(
        model=example.make_model(0, 0),
        args=arguments,
        train_dataset=example.Windows(load_text(1 << 16)),
        on_error="warn",
        timeout_s=30.0,
    )
    trainer.train()
    print(f"rank {arguments.process_index} trained to step {trainer.state.global_step}")


main()
