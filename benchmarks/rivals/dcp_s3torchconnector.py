"""torch.distributed.checkpoint with s3torchconnector's writer and reader, in one process.

Its documents call dcp.save(state, storage_writer=S3StorageWriter(region, path)), and dcp.load with
S3StorageReader. The endpoint of
another server than Amazon's is an argument of its client alone.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["s3torchconnector[dcp]==1.5.0"]
# ///

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fastckpt.cli.bench.saves import Save, State, nothing
from rivals.peer import Peer


class DcpToS3(Peer):
    """dcp.save through S3StorageWriter, and dcp.load through S3StorageReader."""

    name = "dcp, s3torchconnector"
    contract = "sync"
    fills_template = True
    modules = ("torch.distributed.checkpoint", "s3torchconnector.dcp")

    def __init__(self, options: dict[str, Any], root: str) -> None:
        self._options, self._root = options, root

    def save(self, state: State, target: Path) -> Save:
        import torch.distributed.checkpoint as dcp
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter(self._options["region"], f"{self._root}/{target.name}")
        writer.fs._client = self._client()
        dcp.save(state, storage_writer=writer, no_dist=True)
        return Save(nothing, nothing)

    def load(self, target: Path, template: State) -> Any:
        import torch.distributed.checkpoint as dcp
        from s3torchconnector.dcp import S3StorageReader

        reader = S3StorageReader(self._options["region"], f"{self._root}/{target.name}")
        reader.fs._client = self._client()
        dcp.load(template, storage_reader=reader, no_dist=True)
        return template

    def _client(self) -> Any:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client

        told = self._options
        os.environ["AWS_ACCESS_KEY_ID"] = told["access_key_id"]
        os.environ["AWS_SECRET_ACCESS_KEY"] = told["secret_access_key"]
        config = S3ClientConfig(force_path_style=True)
        return S3Client(told["region"], endpoint=told["endpoint"], s3client_config=config)
