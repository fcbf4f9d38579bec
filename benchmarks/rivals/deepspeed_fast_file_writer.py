"""DeepSpeed's FastFileWriter: libaio, O_DIRECT and a double buffer below torch.save.

The documents hand a FastFileWriter to torch.save as its file. Its close() syncs the file. DeepSpeed
compiles its extension when it is first asked for, with a C++ compiler and the headers of libaio.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["deepspeed==0.19.8", "ninja==1.13.2"]
# ///

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch

from fastckpt.cli.bench.saves import Save, State, byte_view, nothing
from rivals.peer import Peer, fsync_tree


class DeepSpeed(Peer):
    """DeepSpeed's FastFileWriter (libaio, O_DIRECT, double buffer) as the file of torch.save."""

    name = "deepspeed"
    contract = "sync; torch.save through FastFileWriter, which fsyncs the file"
    modules = ("deepspeed",)
    buffer_bytes = 128 << 20

    def load_modules(self) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "extensions"))
        super().load_modules()

    def open(self) -> None:
        import deepspeed.io.fast_file_writer as writer
        from deepspeed.ops.op_builder import AsyncIOBuilder

        super().open()

        class ByteCast:
            """Stands in for the extension op that DeepSpeed does not build for the CPU."""

            def load(self, verbose: bool = False) -> Any:
                return self

            def cast_to_byte_tensor(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
                return [byte_view(tensor) for tensor in tensors]

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        writer.UtilsBuilder = ByteCast
        block, depth, single_submit, overlap, threads = 8 << 20, 32, False, True, 2
        self.handle = (
            AsyncIOBuilder()
            .load(verbose=False)
            .aio_handle(block, depth, single_submit, overlap, threads)
        )
        self.buffer = self.handle.new_cpu_locked_tensor(
            self.buffer_bytes, torch.empty(0, dtype=torch.uint8)
        )
        self.held.callback(self.handle.free_cpu_locked_tensor, self.buffer)

    def writer(self, path: Path) -> Any:
        import deepspeed.io.fast_file_writer as writer

        config = writer.FastFileWriterConfig(
            dnvme_handle=self.handle, pinned_tensor=self.buffer, double_buffer=True
        )
        return writer.FastFileWriter(str(path), config)

    def save(self, state: State, target: Path) -> Save:
        writer = self.writer(target / "state.pt")
        torch.save(state, writer)
        writer.close()
        return Save(nothing, lambda: fsync_tree(target))

    def load(self, target: Path, template: State) -> Any:
        return torch.load(target / "state.pt", weights_only=True)
