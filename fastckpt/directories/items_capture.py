"""The capture of the items of a torch.distributed.checkpoint plan: bytes, or tensors, which stay in
place if their memory can be copied directly.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from fastckpt.engine.devices import Devices, DeviceSources
from fastckpt.formats.torch_pickle import torch_save
from fastckpt.saving.mutation_check import WatchedTensors
from fastckpt.state.kinds import PLAIN_TENSORS, copied_later

_ATOMS = (bool, int, float, str, type(None))


def captured_items(
    plan: SavePlan, planner: SavePlanner, devices: Devices, watch: bool
) -> tuple[list[torch.Tensor | bytes], DeviceSources, list[WatchedTensors]]:
    """Returns a plan's items, as bytes or tensors (in place if they are contiguous); the device
    memory to read; and, with `watch`, the tensors that must not change before they are copied.
    """
    kinds, stock = devices.readable(), type(planner)
    # Most objects are numbers, and many are equal, so each value is pickled once.
    looks_up = stock.resolve_data is DefaultSavePlanner.resolve_data
    looks_up &= getattr(stock, "transform_object", 0) is DefaultSavePlanner.transform_object
    known: dict[tuple[type, str], bytes] = {}
    items: list[torch.Tensor | bytes] = []
    watched: list[tuple[torch.Tensor, int]] = []
    names: dict[str, torch.Tensor] = {}
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            items.append(_pickled(item, planner, known if looks_up else None))
            continue
        tensor: Any = planner.resolve_data(item)
        local = _readable(tensor.detach(), kinds, watch)
        items.append(local)
        if watch and isinstance(local, torch.Tensor) and not local.is_inference():
            watched.append((local, local._version))
            names[item.index.fqn] = local
    storages = [item.untyped_storage() for item in items if isinstance(item, torch.Tensor)]
    guards = [WatchedTensors(watched, names)] if watched else []
    return items, devices.reads(storages), guards


def _pickled(item: WriteItem, planner: Any, known: dict[tuple[type, str], bytes] | None) -> bytes:
    value = None if known is None else planner.lookup_object(item.index)
    if known is None or type(value) not in _ATOMS:
        content: bytes = planner.resolve_data(item).getvalue()
        return content
    key = type(value), repr(value)
    if key not in known:
        known[key] = planner.transform_object(item, value).getvalue()
    return known[key]


def _readable(tensor: torch.Tensor, kinds: frozenset[str], watch: bool) -> torch.Tensor | bytes:
    """Returns a tensor whose memory can be copied directly, or the bytes that torch.save writes for
    it.
    """
    if type(tensor) not in PLAIN_TENSORS and hasattr(tensor, "wait"):
        tensor = tensor.wait()  # a collective may still run
    plain = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.is_nested:
        tensor = tensor.cpu()
        file = io.BytesIO()
        torch_save(tensor, file)
        return file.getvalue()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return copied_later(tensor, kinds, watch)
