"""Run:ai Model Streamer: loads of the file that safetensors writes, by threads in C++.

The documents take tensors from a SafetensorsStreamer as they arrive and move them to the GPU. Here
they stay where they arrived, which needs memory for all of them: no limit is set.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["runai-model-streamer==0.17.0"]
# ///

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from state import State

from rivals.safetensors_file import FILE, SafetensorsFile


class RunaiStreamer(SafetensorsFile):
    """SafetensorsStreamer into host memory."""

    name = "runai-model-streamer"
    contract = "loads only, the file of safetensors; no checksum"
    loads_only = True
    modules = ("safetensors.torch", "runai_model_streamer")

    def load_modules(self) -> None:
        # Below a limit it would reuse the memory of tensors that it has handed out.
        os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = "-1"
        super().load_modules()

    def load(self, target: Path, template: State) -> Any:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(target / FILE))
            return dict(streamer.get_tensors())
