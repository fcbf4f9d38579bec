"""What each rank does in the tests of torchtitan's checkpoint manager.

Responsible for a folder that only the first rank sees at first. Must not know what should come of
it.
"""

from __future__ import annotations

import os
from pathlib import Path

from fastckpt.storage.file_system import Storage
from tests.crews.group_crew import Member
from tests.kit.doubles import process_on
from tests.kit.torchtitan import Run


class Lagging(Storage):
    """What is in the folder is there if it is looked at by its name, but is not listed yet."""

    def names(self, directory: str, *, directories: bool = False) -> list[str]:
        found = super().names(directory, directories=directories)
        return [] if os.path.basename(directory) == "run" else found


def train_and_load(member: Member, disk: str) -> tuple[bool, int]:
    """Whether anything was loaded, and the step with which training goes on."""
    before = Run(Path(disk), timeout_s=20)
    before.train(2)
    before.checkpointer.maybe_wait_for_saving()
    before.checkpointer.close()
    with process_on(Lagging() if member.rank else Storage()):
        after = Run(Path(disk), timeout_s=20)
        is_loaded = after.checkpointer.load()
        after.checkpointer.close()
    return is_loaded, after.trainer.step
