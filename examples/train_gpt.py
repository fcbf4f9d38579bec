"""Train a small GPT on the Python standard library's own source, with fastckpt checkpoints.

This file is responsible for a complete training script: model, data, loop, save and resume.

    python train_gpt.py --steps 200 --save-every 20 --path ckpt.pt            # train
    python train_gpt.py --steps 400 --save-every 20 --path ckpt.pt --resume   # go on from there
    python train_gpt.py --demo                                                # crash and timings
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastckpt


@dataclass(frozen=True)
class Preset:
    """The size of the model and of its batches."""

    width: int
    layers: int
    heads: int
    context: int  # bytes of text that the model sees
    batch: int  # windows of text in a step
    dropout: float = 0.1


PRESETS = {
    "tiny": Preset(width=64, layers=2, heads=2, context=64, batch=4),  # 0.1 M parameters
    "small": Preset(width=192, layers=4, heads=6, context=128, batch=8),  # 1.9 M parameters
    "demo": Preset(width=320, layers=7, heads=5, context=128, batch=4),  # 8.8 M parameters
}


class Block(nn.Module):
    """One transformer block: causal self-attention, then a two-layer perceptron."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        width = preset.width
        self.heads = preset.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(preset.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer over the 256 byte values."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.token = nn.Embedding(256, preset.width)
        self.position = nn.Embedding(preset.context, preset.width)
        self.blocks = nn.Sequential(*(Block(preset) for _ in range(preset.layers)))
        self.norm = nn.LayerNorm(preset.width)
        self.head = nn.Linear(preset.width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.token(text) + self.position(torch.arange(text.shape[1], device=text.device))
        return self.head(self.norm(self.blocks(x)))


def load_text(limit: int = 2 << 20) -> Tensor:
    """Returns the first `limit` bytes of the standard library's top-level modules, by name."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray().join(module.read_bytes() for module in modules)
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def make_batch(text: Tensor, preset: Preset, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets of a step, which depend on nothing but the seed and the step."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    last = len(text) - preset.context
    starts = torch.randint(last, (preset.batch, 1), generator=generator)
    windows = text[starts + torch.arange(preset.context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def make_model(preset: Preset, seed: int, ballast_mib: int) -> tuple[GPT, torch.optim.Optimizer]:
    """Returns the model and its optimizer; the ballast stands for the weights of a bigger model."""
    torch.manual_seed(seed)
    model = GPT(preset)
    if ballast_mib:
        generator = torch.Generator().manual_seed(seed)
        model.register_buffer("ballast", torch.rand(ballast_mib << 18, generator=generator))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: GPT, inputs: Tensor, targets: Tensor) -> float:
    """Computes the gradients, which it leaves in the model, and returns the loss."""
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    model.zero_grad()
    loss.backward()
    return loss.item()


def capture(model: GPT, optimizer: torch.optim.Optimizer, step: int) -> dict[str, object]:
    """Returns all that the run needs to go on after `step` steps; copies no tensor."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "step": step,
    }


def restore(path: Path, model: GPT, optimizer: torch.optim.Optimizer) -> int:
    """Loads the checkpoint at `path`; returns the number of steps that it had made."""
    state = fastckpt.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    return state["step"]


def train(args: argparse.Namespace) -> None:
    """Runs the training loop, in which only fastckpt.save() is not plain PyTorch."""
    torch.use_deterministic_algorithms(True)
    preset, text = PRESETS[args.preset], load_text()
    model, optimizer = make_model(preset, args.seed, args.ballast)
    first = 0
    if args.resume and args.path.exists():
        first = restore(args.path, model, optimizer)
        print(f"resumed from {args.path} at step {first}")

    handle = None
    with open(args.loss_log or os.devnull, "a" if args.resume else "w", buffering=1) as log:
        for step in range(first, args.steps):
            loss = train_step(model, *make_batch(text, preset, args.seed, step))
            optimizer.step()
            log.write(json.dumps({"step": step, "loss": loss.hex()}) + "\n")
            if step % 10 == 0 or step == args.steps - 1:
                print(f"step {step:5d}   loss {loss:.4f}", flush=True)
            if args.save_every and (step + 1) % args.save_every == 0:
                state = capture(model, optimizer, step + 1)
                handle = fastckpt.save(
                    state, args.path, options=fastckpt.SaveOptions(fence=args.fence)
                )

    if handle:  # waits until the last checkpoint is on disk; raises if it could not be saved
        stats = handle.result()
        print(
            f"saved {stats.nbytes / 1e6:.1f} MB to {args.path} with {stats.backend}: "
            f"blocked {stats.stall_s:.3f} s, durable after {stats.committed_s:.3f} s"
        )


def main() -> int:
    """Parses the command line, then trains or runs the demonstration; returns the exit code."""
    parser = argparse.ArgumentParser(description="Train a small GPT with fastckpt checkpoints.")
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="model size; default: small, or demo with --demo")
    add("--steps", type=int, default=100, help="train up to this step")
    add("--save-every", type=int, default=10, metavar="STEPS", help="0: never")
    add("--path", type=Path, default=Path("ckpt.pt"), help="the checkpoint")
    add("--resume", action="store_true", help="go on from the last committed checkpoint, if any")
    add("--fence", choices=("call", "step"), default="call", help="what waits for the copy")
    add("--seed", type=int, default=0)
    add("--loss-log", type=Path, metavar="FILE", help="JSON lines: step, loss in hexadecimal")
    add("--ballast", type=int, default=0, metavar="MIB", help="unused weights: a bigger file")
    add("--demo", action="store_true", help="kill a run in mid-save, resume it, time the saves")
    args = parser.parse_args()
    if args.demo:
        import demo

        return demo.run(args.preset or "demo", args.seed)
    args.preset = args.preset or "small"
    train(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
