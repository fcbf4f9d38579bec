"""The end of a rank of Accelerate's: it saves or loads, as it was told, and leaves what it found.

It must not know what is trained.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState

Part = Callable[[str], dict[str, Any]]


def main(save: Part, load: Part) -> None:
    """Runs one of both in the directory that the command line names."""
    torch.set_num_threads(1)
    told = (save if sys.argv[1] == "save" else load)(sys.argv[2])
    state = PartialState()
    Path(f"told {state.process_index}").write_text(json.dumps(told))
    state.destroy_process_group()
