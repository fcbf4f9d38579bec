"""Train the GPT of train_gpt.py with FSDP2 and a fastckpt.Checkpointer, on any number of ranks.

This file is responsible for a complete training script whose model is sharded: each rank saves its
own part, and the job goes on from the last committed step, on as many ranks as it is started with.

    torchrun --standalone --nproc-per-node 2 train_fsdp2.py --steps 100 --root run    # train
    torchrun --standalone --nproc-per-node 3 train_fsdp2.py --steps 200 --root run    # go on
    python train_fsdp2.py --steps 300 --root run                                      # alone
    torchrun --standalone --nproc-per-node 4 train_fsdp2.py --steps 400 --root run --tp 2

With --tp 2 (tensor parallelism), each pair of ranks divides the perceptrons' layers, and FSDP
divides all weights once more among the pairs. A step restores on any other mesh.

The job may be killed at any time. With --max-restarts 3 torchrun starts it again by itself; then
set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or the new ranks look for the dead ones' addresses.

With --memory /dev/shm --every 2 --root-every 20 every second step is saved to the memory of the
nodes and of their neighbours, and every twentieth to the root. On one machine, ranks play nodes:

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 train_fsdp2.py --steps 400 \\
        --root run --every 2 --memory '/dev/shm/node-{rank}' --root-every 20

Kill a rank, and remove /dev/shm/node-1 before: each rank says where its files came from.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranks import (
    Rank,
    arguments,
    joined,
    loss_log,
    preset_of,
    report,
    report_saves,
    tensorboard_log,
    train_step,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim.lr_scheduler import LinearLR
from train_gpt import Preset, load_text, make_model

import fastckpt

# The logits are a view of the last layer's output; nothing here changes them in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class Replicated(ParallelStyle):
    """A module whose weights all tensor parallel ranks hold and use alike.

    A module without a style would be on FSDP's mesh alone: a Checkpointer could not know that the
    other ranks hold the same weights.
    """

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def distributed(_module: nn.Module, inputs: tuple[Tensor, ...], _mesh: Any) -> Any:
            alike = [Replicate()]
            return tuple(DTensor.from_local(each, mesh, alike, run_check=False) for each in inputs)

        def local(_module: nn.Module, output: DTensor, _mesh: Any) -> Tensor:
            return output.to_local()

        return distribute_module(module, mesh, None, distributed, local)


BLOCK_PLAN = {
    "attention_norm": Replicated(),
    "qkv": Replicated(),
    "projection": Replicated(),
    "mlp_norm": Replicated(),
    "mlp.0": ColwiseParallel(),
    "mlp.2": RowwiseParallel(),
}
PLAN = {
    "token": RowwiseParallel(input_layouts=Replicate()),
    "position": Replicated(),
    "norm": Replicated(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


class Training:
    """Model and optimizer, whose stored state depends on neither the mesh nor the order of
    parameters: get_state_dict() gives names in the place of numbers.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class OwnState:
    """The state of one rank: how far it has read its share of the text, and its generators. `rank`
    is this rank among those that share a batch; tensor parallel ranks have the same one.

    A job on another mesh divides the text in another way: it does not load this, but sets it by
    `start_at`.
    """

    def __init__(
        self, rank: Rank, mesh: tuple[int, ...], text: Tensor, preset: Preset, seed: int
    ) -> None:
        self.rank, self.text, self.preset, self.seed = rank, text, preset, seed
        self.mesh = list(mesh)
        self.start_at(0)

    def start_at(self, batches: int) -> None:
        """Sets the state after so many batches, with random numbers that no other share has."""
        self.batches = batches
        torch.manual_seed((self.seed * 1_000_003 + batches) * 1_009 + self.rank.number)

    def next_share(self) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of the next step."""
        self.batches += 1
        return self.rank.share(self.text, self.preset, self.seed, self.batches - 1)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"mesh": self.mesh, "batches": self.batches}
        state["rng"] = torch.get_rng_state()
        if self.rank.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.rank.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["mesh"] != self.mesh:
            return
        self.batches = state["batches"]
        torch.set_rng_state(state["rng"])
        if self.rank.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], self.rank.device)


def make_sharded(
    preset: Preset, seed: int, ballast_mib: int, mesh: DeviceMesh, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer, LinearLR]:
    """Returns the model, of which each rank keeps a part, its optimizer and a warm-up schedule."""
    model, _ = make_model(preset, seed, ballast_mib)  # the same on all ranks
    model.to(device)
    if mesh["tp"].size() > 1:
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], BLOCK_PLAN)
        parallelize_module(model, mesh["tp"], PLAN)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, LinearLR(optimizer, start_factor=0.1, total_iters=20)


def in_memory(directory: str | None, root_every: int, rank: Rank) -> fastckpt.Memory | None:
    """Returns the memory of this rank's node, if steps are to go there first."""
    if directory is None:
        return None
    path = Path(directory.replace("{rank}", str(rank.number)))
    path.mkdir(parents=True, exist_ok=True)
    return fastckpt.Memory(directory=path, root_every=root_every)


def sources(checkpointer: fastckpt.Checkpointer) -> str:
    """Returns, in words, where the files of the last restore came from."""
    paths = [*checkpointer.restored_from.values()]
    root = sum(path.startswith(f"{checkpointer.root}/") for path in paths)
    others = sum(not path.startswith(("/", checkpointer.root)) for path in paths)
    here = len(paths) - root - others
    return f"{here} files from memory, {others} from another node's, {root} from the root"


def main() -> int:
    parser = arguments("Train a small GPT with FSDP2 and fastckpt checkpoints.")
    add = parser.add_argument
    add("--root", type=Path, default=Path("run"), help="where the steps are kept")
    add("--resume", action="store_true", help="refuse to begin anew: there have to be steps")
    add("--tp", type=int, default=1, metavar="RANKS", help="how many ranks divide each layer")
    add("--memory", metavar="DIR", help="a tmpfs to save to first; {rank} in it plays a node")
    add("--root-every", type=int, default=1, metavar="N", help="with --memory: steps of the root")
    add("--tensorboard", type=Path, metavar="DIR", help="log what saves took for TensorBoard")
    args = parser.parse_args()
    with joined() as rank:
        preset = preset_of(args, rank)
        if rank.world_size % args.tp:
            raise SystemExit(f"{rank.world_size} ranks cannot be divided into groups of {args.tp}")
        sizes = (rank.world_size // args.tp, args.tp)
        mesh = init_device_mesh(rank.device.type, sizes, mesh_dim_names=("dp", "tp"))
        model, optimizer, scheduler = make_sharded(
            preset, args.seed, args.ballast, mesh, rank.device
        )
        reader = replace(rank, number=mesh["dp"].get_local_rank(), world_size=sizes[0])
        own = OwnState(reader, sizes, load_text(), preset, args.seed)
        state = {
            "training": Training(model, optimizer),  # DTensors: each rank saves its part
            "scheduler": scheduler,  # the same on all ranks: taken from the first
            "own": fastckpt.PerRank(own),
        }
        saves: list[fastckpt.SaveHandle] = []
        memory = in_memory(args.memory, args.root_every, rank)
        with (
            tensorboard_log(args.tensorboard, rank) as tell,
            fastckpt.Checkpointer(args.root, local=memory, keep_last=3) as checkpointer,
            loss_log(args.loss_log, rank) as log,
        ):
            first = checkpointer.restore(state, required=args.resume) or 0
            if own.batches != first:  # the step was saved on another mesh
                own.start_at(first)
            if first:
                rank.print(f"restored step {first} on {rank.world_size} ranks")
            if first and memory:
                print(f"rank {rank.number}: {sources(checkpointer)}", flush=True)
            for step in range(first, args.steps):
                loss = train_step(model, preset, *own.next_share(), mesh["dp"].get_group())
                optimizer.step()
                scheduler.step()
                report(log, rank, step, loss, last=step == args.steps - 1)
                if args.every and (step + 1) % args.every == 0:
                    # The job ends soon after the last step, which goes to the root in any case.
                    ends_s = 60.0 if memory and step + 1 == args.steps else None
                    saves.append(checkpointer.save(step + 1, state, deadline_s=ends_s))
                    saves[-1].add_done_callback(partial(tell, step=step + 1))
                report_saves(saves, rank)
            report_saves(saves, rank, wait=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
