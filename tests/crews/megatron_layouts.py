"""What each rank does in the tests of Megatron's other layouts: experts, and interleaved chunks.

Responsible for models with experts or with several chunks on a rank, filled as megatron_bodies
fills others, and for telling what came of a save or a load. Must not know what should come of it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from fastckpt.integrations import megatron
from fastckpt.integrations.megatron import optimizer as optimizers
from tests.crews import megatron_bodies as bodies
from tests.crews.group_crew import Member

HIDDEN, LAYERS = 32, 4


def build(
    tp: int, pp: int, vp: int | None = None, ep: int = 1, experts: int | None = None, seed: int = 1
) -> tuple[list[Any], Any]:
    """The chunks of a model that this rank has, and their optimizer."""
    bodies.regroup(tp, pp, vp, ep)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tp,
            pp,
            vp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        num_moe_experts=experts,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
    )
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=3000)
    stages = range(vp or 1)
    models = [
        DistributedDataParallel(config, ddp, _chunk(config, None if vp is None else stage))
        for stage in stages
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=3e-3, weight_decay=0.1, use_distributed_optimizer=True
        ),
        models,
        use_gloo_process_groups=False,
    )
    return models, optimizer


def _chunk(config: TransformerConfig, stage: int | None) -> Any:
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False),
        256,
        64,
        pre_process=parallel_state.is_pipeline_first_stage(False, stage),
        post_process=parallel_state.is_pipeline_last_stage(False, stage),
        share_embeddings_and_output_weights=False,
        vp_stage=stage,
    )


@bodies.on_the_cpu
def save(_member: Member, root: str, layout: dict[str, Any], how: dict[str, Any]) -> int:
    """Returns how many distributed optimizers are chained."""
    models, optimizer = build(**layout)
    bodies.make_numbered(models, optimizer)
    megatron.save_checkpoint(1, models, optimizer, None, 5, save=root, **how).result(60)
    return len(optimizers.distributed(optimizer))


@bodies.on_the_cpu
def load(_member: Member, root: str, layout: dict[str, Any]) -> tuple[Any, list[str]]:
    models, optimizer = build(**layout, seed=3)
    found = megatron.load_checkpoint(models, optimizer, load=root)
    return found, bodies.wrong_keys(models, optimizer)
