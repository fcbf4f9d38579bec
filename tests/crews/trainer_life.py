"""One rank of a Trainer whose second rank cannot write its part of one checkpoint, within Trainer's
own save or before that.

torchrun --nproc-per-node 2 trainer_life.py OUTPUT_DIR within|before
"""

from __future__ import annotations

import errno
import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import transformers_trainer as example
from train_gpt import load_text
from transformers import TrainingArguments

from fastckpt import SaveOptions
from fastckpt.integrations.transformers import AsyncTrainer
from fastckpt.storage.file_system import Storage

FAILS_AT, EVERY, STEPS = 4, 2, 6


class Unlucky(AsyncTrainer):
    def _is_due(self, when: str) -> bool:
        is_it = self.args.process_index == 1 and self.state.global_step == FAILS_AT
        return is_it and sys.argv[2] == when

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        full = OSError(errno.ENOSPC, "no room for this rank")
        with ExitStack() as stack:
            if self._is_due("before"):
                stack.enter_context(mock.patch.object(Storage, "make_directory", side_effect=full))
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        if self._is_due("within"):
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
        options=SaveOptions(on_error="warn", timeout_s=30.0),
    )
    trainer.train()
    print(f"rank {arguments.process_index} trained to step {trainer.state.global_step}")


main()
