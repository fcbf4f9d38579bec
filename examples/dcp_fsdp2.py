"""Train the GPT of train_gpt.py with FSDP2 and torch.distributed.checkpoint on fastckpt's engine.

This file is responsible for a training script with DCP's checkpoints, by fastckpt's async_save and
Reader in the places of torch's: it may be killed at any time, and goes on from the last committed
step, on as many ranks as it is started with. Stock dcp.load() reads what it saves.

    torchrun --standalone --nproc-per-node 2 dcp_fsdp2.py --steps 100 --root run    # train
    torchrun --standalone --nproc-per-node 3 dcp_fsdp2.py --steps 200 --root run    # go on
    python dcp_fsdp2.py --steps 300 --root run                                      # alone

"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from ranks import arguments, joined, loss_log, preset_of, report, train_step
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from train_fsdp2 import make_sharded
from train_gpt import load_text

from fastckpt.integrations.dcp import Reader, Saving, async_save

# torch's own warnings in a job on CPUs, which mean nothing here.
warnings.filterwarnings("ignore", module="torch.distributed")


def latest(root: Path) -> int:
    """Returns the newest step that has `.metadata`, which is written last; 0 if there is none."""
    return max((int(path.parent.name[5:]) for path in root.glob("step-*/.metadata")), default=0)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Returns the state to save, or for a load to fill in."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "step": step}


def main() -> int:
    parser = arguments("Train a small GPT with FSDP2, checkpoints by DCP on fastckpt's engine.")
    parser.add_argument("--root", type=Path, default=Path("run"), help="where the steps are kept")
    args = parser.parse_args()
    with joined() as rank, loss_log(args.loss_log, rank) as log:
        preset, text = preset_of(args, rank), load_text()
        kind, sizes = rank.device.type, (rank.world_size, 1)
        mesh = init_device_mesh(kind, sizes, mesh_dim_names=("dp", "tp"))
        model, optimizer, _ = make_sharded(preset, args.seed, args.ballast, mesh, rank.device)
        first = latest(args.root)
        if first:
            state = state_of(model, optimizer, 0)
            dcp.load(state, storage_reader=Reader(args.root / f"step-{first}"))
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            assert state["step"] == first
            rank.print(f"restored step {first} on {rank.world_size} ranks")
        saving: Saving | None = None
        for step in range(first, args.steps):
            loss = train_step(model, preset, *rank.share(text, preset, args.seed, step))
            optimizer.step()
            report(log, rank, step, loss, last=step == args.steps - 1)
            if args.every and (step + 1) % args.every == 0:
                if saving is not None:
                    saving.result()  # raises if it failed; here one save at a time is enough
                saving = async_save(
                    state_of(model, optimizer, step + 1),
                    checkpoint_id=args.root / f"step-{step + 1}",
                )
        if saving is not None:
            saving.result()
            rank.print(
                f"saved {saving.path}: stalled {saving.stats.stall_s * 1e3:.1f} ms, "
                f"durable after {saving.stats.committed_s * 1e3:.0f} ms"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
