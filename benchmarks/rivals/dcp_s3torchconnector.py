"""torch.distributed.checkpoint with the S3StorageWriter of s3torchconnector, in one process.

Its documents call dcp.save(state, storage_writer=S3StorageWriter(region, path)). The endpoint of
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

from rivals.peer import Peer, Save, State, already


class DcpToS3(Peer):
    """dcp.save through S3StorageWriter."""

    name = "dcp, s3torchconnector"
    contract = "sync"
    modules = ("torch.distributed.checkpoint", "s3torchconnector.dcp")

    def __init__(self, options: dict[str, Any], root: str) -> None:
        self._options, self._root = options, root

    def save(self, state: State, target: Path) -> Save:
        import torch.distributed.checkpoint as dcp
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import S3StorageWriter

        told = self._options
        os.environ["AWS_ACCESS_KEY_ID"] = told["access_key_id"]
        os.environ["AWS_SECRET_ACCESS_KEY"] = told["secret_access_key"]
        config = S3ClientConfig(force_path_style=True)
        client = S3Client(told["region"], endpoint=told["endpoint"], s3client_config=config)
        writer = S3StorageWriter(told["region"], f"{self._root}/{target.name}")
        writer.fs._client = client
        dcp.save(state, storage_writer=writer, no_dist=True)
        return Save(already, already)

    def load(self, target: Path, template: State) -> Any:
        raise NotImplementedError
