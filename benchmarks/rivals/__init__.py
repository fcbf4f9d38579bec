"""The rivals: a file for each library, with the versions it is measured at and its environment.

A library that can be called in several ways is several peers. Each of them runs in a process of its
own and is measured by the same functions; fastckpt and torch.save are among them.
"""

from __future__ import annotations

from rivals.dcp import Dcp, DcpAsync, DcpAsyncStager
from rivals.deepspeed_fast_file_writer import DeepSpeed
from rivals.fastckpt_save import Fastckpt, FastckptStep
from rivals.fastsafetensors_open import FastSafetensors
from rivals.peer import Peer
from rivals.runai_streamer import RunaiStreamer
from rivals.safetensors_file import SafetensorsFile
from rivals.torch_checkpointing_save import TorchCheckpointing
from rivals.torch_save import TorchSave, TorchSaveNoCrc
from rivals.torchsnapshot_take import TorchSnapshot, TorchSnapshotAsync

PEERS: tuple[type[Peer], ...] = (
    TorchSave,
    TorchSaveNoCrc,
    SafetensorsFile,
    FastSafetensors,
    RunaiStreamer,
    Dcp,
    DcpAsync,
    DcpAsyncStager,
    TorchSnapshot,
    TorchSnapshotAsync,
    TorchCheckpointing,
    DeepSpeed,
    Fastckpt,
    FastckptStep,
)
BASELINE = TorchSave.name
