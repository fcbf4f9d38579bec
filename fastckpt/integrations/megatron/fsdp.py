"""Megatron-FSDP's checkpoints, the format fsdp_dtensor: a DCP directory of DTensors.

Responsible for the keys that a model and its optimizer have in one, and for reading it into the
tensors that they hold. It must not know iterations, directories' names, schedules or generators.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import fsdp_dtensor_checkpoint as stock
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fastckpt import IncompatibleCheckpoint
from fastckpt.integrations.megatron.optimizer import SHARDING
from fastckpt.integrations.megatron.partial_reads import read

FORMAT = "fsdp_dtensor"
_COMMON = {
    "args",
    "checkpoint_version",
    "iteration",
    "num_floating_point_operations_so_far",
    "opt_param_scheduler",
    "rng_state",
}
_HALF = re.compile(r"\.linear_fc1\.(weight|bias)\d*_[wv](\.|$)")  # of a SwiGLU layer
_NAMED = 5  # how many keys an error names


def is_wrapped(models: Sequence[Any]) -> bool:
    """Whether chunks of a model, unwrapped as Megatron does it, are Megatron-FSDP's."""
    return any(
        getattr(getattr(model, "ddp_config", None), "use_megatron_fsdp", False) for model in models
    )


def stored_common(directory: str, metadata: Metadata, weights_only: bool = True) -> dict[str, Any]:
    """Returns the state but for the model and the optimizer; see read() for errors."""
    paths, state = metadata.planner_data or {}, dict[str, Any]()
    for key, stored in metadata.state_dict_metadata.items():
        path = paths.get(key, (key,))
        if path[0] in _COMMON:
            value = None
            if isinstance(stored, TensorStorageMetadata):
                dtype = stored.properties.dtype
                value = torch.empty(stored.size, dtype=dtype, device="cpu")
            set_element(state, path, value)
    read(directory, DefaultLoadPlanner(), state, weights_only=weights_only)
    return state


def own_rng(common: dict[str, Any]) -> list[Any]:
    """Returns a list of this rank's random number state; empty if saved on another parallelism."""
    ps = parallel_state
    pp, tp = ps.get_pipeline_model_parallel_world_size(), ps.get_tensor_model_parallel_world_size()
    at = (ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank())
    saved = common.get("rng_state") or {}
    states = saved.get(str(at), []) if len(saved) == pp * tp else []
    if len(states) == ps.get_data_parallel_world_size():  # data parallel ranks were seeded apart
        states = [states[ps.get_data_parallel_rank()]]
    if len(states) != 1:
        return []
    return [{"rng_tracker_states": {}, **states[0]}]  # DCP saves no empty dict


class Restore:
    """One load of a checkpoint into a model and its optimizer (None: that is not loaded).

    Raises:
        IncompatibleCheckpoint: the model has several chunks, or the optimizer has other kinds of
            state than were saved.
    """

    def __init__(
        self,
        directory: str,
        metadata: Metadata,
        models: Sequence[Any],
        optimizer: Any,
        weights_only: bool = True,
    ) -> None:
        if len(models) != 1:
            raise IncompatibleCheckpoint(f"{FORMAT} holds one chunk of a model, not {len(models)}")
        self._directory, self._weights_only = directory, weights_only
        self._stored = metadata.state_dict_metadata
        self._model, self._optimizer = models[0], optimizer
        # First of all: it replaces the parameters by DTensors, which the optimizer needs.
        self._weights = models[0].state_dict()
        self._kept: dict[str, Any] = {}  # the optimizer's state dict
        self._held: dict[str, Any] = {}  # the states that this rank has
        if optimizer is not None:
            self._kept = optimizer.sharded_state_dict(
                {}, is_loading=True, metadata={SHARDING: FORMAT}
            )
            self._held = self._kept["state"]
            self._kept["state"] = self._on_all_ranks()

    def read(self) -> None:
        """Overwrites the model's and the optimizer's tensors. All ranks call it: Megatron runs a
        collective for each tensor, to find out which part of it a rank has.

        Raises:
            CorruptCheckpoint: bytes are not those that were written.
            IncompatibleCheckpoint: the checkpoint lacks keys, which are named.
        """
        state: dict[str, Any] = {"model": self._weights}
        if self._optimizer is not None:
            state["optimizer"] = self._kept
        self._rename(state)
        self._check(state)
        read(self._directory, DefaultLoadPlanner(), state, weights_only=self._weights_only)

    def put(self) -> None:
        """Has model and optimizer use what was read."""
        self._model.synchronize_param_gather()  # drops weights gathered before
        self._model.install_optimized_model_weights()
        if self._optimizer is not None:
            self._kept["state"] = self._held
            self._optimizer.load_state_dict(self._kept)

    def _on_all_ranks(self) -> dict[str, Any]:
        """Returns the optimizer's states, with empty ones where this rank has an empty shard.

        torch's optimizers, unlike Transformer Engine's, have none for these. For Megatron's
        collectives all ranks have to hold the same number of DTensors, in the same order.
        """
        kinds = sorted(
            {
                key.rpartition(".")[2]
                for key, stored in self._stored.items()
                if key.startswith("optimizer.state.") and len(getattr(stored, "size", ())) > 0
            }
        )
        states = {}
        for group in self._optimizer.optimizer.param_groups:
            for param in group["params"]:
                name = self._optimizer._param_name(param)
                held = self._held.get(name)
                if held is None:
                    held = {kind: torch.zeros_like(param.detach()) for kind in kinds}
                elif sorted(k for k, v in held.items() if hasattr(v, "device_mesh")) != kinds:
                    raise IncompatibleCheckpoint(
                        f"the optimizer has the states {sorted(held)} of {name!r}, but {kinds} "
                        "were saved"
                    )
                states[name] = held
        return states

    def _rename(self, state: dict[str, Any]) -> None:
        """Changes the keys of a state dict to those under which Megatron saves it."""
        from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

        stock.handle_fp8_extra_state_case(state["model"])
        model = _Parameters(self._model)
        if any(_HALF.search(key) for key in self._stored):
            state["model"], optimizer = stock.handle_swiglu_in_state_dict(
                model, state["model"], state.get("optimizer")
            )
            state |= {} if optimizer is None else {"optimizer": optimizer}
        state["model"] = stock.handle_experts_in_state_dict(
            state["model"], getattr(model.config, "num_moe_experts", None)
        )
        uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)

    def _check(self, state: dict[str, Any]) -> None:
        wanted, _paths = flatten_state_dict(state)
        missing = sorted(wanted.keys() - self._stored.keys())
        if missing:
            raise IncompatibleCheckpoint(
                f"{self._directory!r} lacks {len(missing)} keys of the model or its optimizer: "
                + ", ".join(map(repr, missing[:_NAMED]))
            )
        for key, value in wanted.items():
            stored = getattr(self._stored[key], "size", None)
            if isinstance(value, torch.Tensor) != (stored is not None) or (
                stored is not None and tuple(stored) != tuple(value.shape)
            ):
                shape = getattr(value, "shape", None)
                raise IncompatibleCheckpoint(
                    f"{key!r} was saved as {stored}, but is {shape} in this model or optimizer"
                )


class _Parameters:
    """A model that finds parameters whatever their wrappers: Megatron's functions count on one more
    wrapper than a model of float32 has.
    """

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self._parameters = {_bare(name): param for name, param in model.named_parameters()}

    def get_parameter(self, name: str) -> Any:
        return self._parameters[_bare(name)]


def _bare(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
