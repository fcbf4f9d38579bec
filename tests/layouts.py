"""The weights of models in the layouts of those who hold them apart, and who fuse them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

import fastckpt

HIDDEN, HEAD, EXPERTS = 8, 4, 12  # more experts than digits


class Model(NamedTuple):
    """A model's tensors both ways, and the rules that make the one of the other, as texts."""

    apart: dict[str, torch.Tensor]
    fused: dict[str, torch.Tensor]
    to_apart: str
    to_fused: str


def rules(text: str) -> Any:
    """The rename= that a text writes."""
    return eval(text, {"split": fastckpt.split, "join": fastckpt.join})


def _experts(state: dict[str, torch.Tensor], prefix: str, made: Any) -> dict[str, torch.Tensor]:
    """Adds the experts of a layer; returns them in one tensor for each kind."""
    gates, ups, downs = [], [], []
    for number in range(EXPERTS):
        for name, its, shape in (
            ("gate", gates, (6, HIDDEN)),
            ("up", ups, (6, HIDDEN)),
            ("down", downs, (HIDDEN, 6)),
        ):
            its.append(made(*shape))
            state[f"{prefix}.experts.{number}.{name}_proj.weight"] = its[-1]
    both = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
    return {
        f"{prefix}.experts.gate_up_proj": torch.stack(both),
        f"{prefix}.experts.down_proj": torch.stack(downs),
    }


EXPERTS_APART = """
    r"\\.experts\\.gate_up_proj": split(0, ".experts.{}.gate_up_proj"),
    r"(experts\\.\\d+)\\.gate_up_proj": split(
        0, [r"\\1.gate_proj.weight", r"\\1.up_proj.weight"]),
    r"\\.experts\\.down_proj": split(0, ".experts.{}.down_proj.weight"),
"""
EXPERTS_FUSED = """
    (r"(experts\\.\\d+)\\.gate_proj\\.weight", r"(experts\\.\\d+)\\.up_proj\\.weight"):
        join(0, r"\\1.gate_up_proj"),
    r"experts\\.{}\\.gate_up_proj": join(0, "experts.gate_up_proj"),
    r"experts\\.{}\\.down_proj\\.weight": join(0, "experts.down_proj"),
"""


def llama(made: Any) -> Model:
    """Fused as vLLM and Phi-3 do it, here with biases."""
    apart: dict[str, torch.Tensor] = {"model.embed_tokens.weight": made(10, HIDDEN)}
    fused = {**apart}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for end, more in (("weight", (HIDDEN,)), ("bias", ())):
            q, k, v = made(4 * HEAD, *more), made(2 * HEAD, *more), made(2 * HEAD, *more)
            for name, its in (("q", q), ("k", k), ("v", v)):
                apart[f"{prefix}.self_attn.{name}_proj.{end}"] = its
            fused[f"{prefix}.self_attn.qkv_proj.{end}"] = torch.cat([q, k, v])
        gate, up, down = made(12, HIDDEN), made(12, HIDDEN), made(HIDDEN, 12)
        apart |= {f"{prefix}.mlp.gate_proj.weight": gate, f"{prefix}.mlp.up_proj.weight": up}
        fused[f"{prefix}.mlp.gate_up_proj.weight"] = torch.cat([gate, up])
        for its in (apart, fused):
            its[f"{prefix}.mlp.down_proj.weight"] = down
    to_apart = """{
        "qkv_proj": split(0, {"q_proj": 16, "k_proj": 8, "v_proj": 8}),
        "gate_up_proj": split(0, ["gate_proj", "up_proj"]),
    }"""
    to_fused = """{
        ("q_proj", "k_proj", "v_proj"): join(0, "qkv_proj"),
        ("gate_proj", "up_proj"): join(0, "gate_up_proj"),
    }"""
    return Model(apart, fused, to_apart, to_fused)


def qwen_moe(made: Any) -> Model:
    """Fused as the modules of transformers 5 are."""
    prefix = "model.layers.0.mlp"
    apart = {f"{prefix}.gate.weight": made(EXPERTS, HIDDEN)}
    apart[f"{prefix}.shared_expert.gate_proj.weight"] = made(6, HIDDEN)
    fused = {**apart}
    fused |= _experts(apart, prefix, made)
    return Model(apart, fused, f"{{{EXPERTS_APART}}}", f"{{{EXPERTS_FUSED}}}")


def deepseek(made: Any) -> Model:
    """A dense layer before one of experts; the projections down to latents are fused, too."""
    apart: dict[str, torch.Tensor] = {}
    fused: dict[str, torch.Tensor] = {}
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        q, kv = made(6, HIDDEN), made(5, HIDDEN)
        apart |= {f"{attention}.q_a_proj.weight": q, f"{attention}.kv_a_proj_with_mqa.weight": kv}
        fused[f"{attention}.fused_qkv_a_proj_with_mqa.weight"] = torch.cat([q, kv])
    dense = {"model.layers.0.mlp.gate_proj.weight": made(6, HIDDEN)}
    dense["model.layers.1.mlp.shared_experts.down_proj.weight"] = made(HIDDEN, 6)
    apart |= dense
    fused |= dense | _experts(apart, "model.layers.1.mlp", made)
    latents = '"fused_qkv_a_proj_with_mqa": split(0, {"q_a_proj": 6, "kv_a_proj_with_mqa": 5}),'
    joined = '(r"\\.q_a_proj", r"\\.kv_a_proj_with_mqa"): join(0, ".fused_qkv_a_proj_with_mqa"),'
    to_apart, to_fused = latents + EXPERTS_APART, joined + EXPERTS_FUSED
    return Model(apart, fused, f"{{{to_apart}}}", f"{{{to_fused}}}")


def gpt2(made: Any) -> Model:
    """Its linear layers are transposed: parts lie beside each other."""
    parts = [made(HIDDEN, HIDDEN) for _ in range(3)]
    names = [f"h.0.attn.{name}.weight" for name in "qkv"]
    apart = dict(zip(names, parts, strict=True))
    fused = {"h.0.attn.c_attn.weight": torch.cat(parts, 1)}
    to_apart = '{r"c_attn\\.": split(-1, ["q.", "k.", "v."])}'
    to_fused = '{(r"attn\\.q", r"attn\\.k", r"attn\\.v"): join(-1, "attn.c_attn")}'
    return Model(apart, fused, to_apart, to_fused)


MODELS: Mapping[str, Any] = {each.__name__: each for each in (llama, qwen_moe, deepseek, gpt2)}


def directions(name: str) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]]:
    """A model apart and fused: what there is, what is to become of it, and by which rules."""
    generator = torch.Generator().manual_seed(7)
    its: Model = MODELS[name](lambda *shape: torch.randn(*shape, generator=generator))
    return [(its.fused, its.apart, its.to_apart), (its.apart, its.fused, its.to_fused)]
