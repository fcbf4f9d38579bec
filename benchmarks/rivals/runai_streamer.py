"""Run:ai's Model Streamer: files of safetensors, streamed by threads in C++ in the order they come.

Its documents stream a file by SafetensorsStreamer and iterate over its tensors. It only loads: the
file is safetensors'. The buffer of a file stays while its tensors do, up to a limit of 40 GB.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["runai-model-streamer==0.17.0", "safetensors==0.8.0"]
# ///

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastckpt.cli.bench.saves import State
from rivals.safetensors_file import FILE, SafetensorsFile


class RunaiStreamer(SafetensorsFile):
    """runai_model_streamer.SafetensorsStreamer on what safetensors has saved."""

    name = "runai-streamer"
    contract = "loads alone, tensors of a safetensors file; no checksum"
    loads_only = True
    modules = ("safetensors.torch", "runai_model_streamer")

    def load(self, target: Path, template: State) -> Any:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(target / FILE))
            return dict(streamer.get_tensors())
