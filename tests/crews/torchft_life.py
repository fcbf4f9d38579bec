"""A replica group of torchft with one rank, on CPUs, that heals by fastckpt's Transport.

    python -m tests.crews.torchft_life LIGHTHOUSE NAME LAST DIRECTORY

Prints a line for each committed step: its number, and a digest of the parameters and of the
optimizer's state. Every group trains on the same batches, so a group that heals has the digests
that a run without failures has. It ends after the step that the file LAST names, once there is one.
"""

from __future__ import annotations

import hashlib
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from fastckpt.integrations.torchft import Transport

WITHIN = timedelta(seconds=20)


def digest(model: torch.nn.Module, optimizer: Any) -> str:
    states = optimizer.state_dict()["state"]
    tensors = [*model.state_dict().values()]
    tensors += [states[number][name] for number in states for name in sorted(states[number])]
    content = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(content).hexdigest()[:16]


def main(lighthouse: str, name: str, last: Path, directory: str) -> None:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = Manager(
        pg=ProcessGroupGloo(timeout=WITHIN),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        timeout=WITHIN,
        quorum_timeout=WITHIN,
        connect_timeout=WITHIN,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname="localhost",
        checkpoint_transport=Transport(address="127.0.0.1", directory=directory),
    )
    trained = DistributedDataParallel(group, model)
    wrapped = Optimizer(group, optimizer)
    while not last.exists() or group.current_step() < int(last.read_text()):
        generator = torch.Generator().manual_seed(group.current_step())
        batch = torch.randn(4, 64, generator=generator)
        wrapped.zero_grad()
        trained(batch).square().mean().backward()
        before = group.current_step()
        wrapped.step()
        if group.current_step() > before:
            print(group.current_step(), digest(model, optimizer), flush=True)
    group.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
