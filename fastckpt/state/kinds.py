"""Kinds of tensors: plain ones, and those of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Collection, Hashable

import torch

from fastckpt.plan.image import BY_VALUE_BYTES

# Of a tensor with elements that has none, in words that follow "is".
NO_MEMORY = "without memory, like FSDP's parameters while they are not gathered"


def memory_of(tensor: torch.Tensor) -> tuple[Hashable, ...] | None:
    """Returns an identity that is equal for tensors with the same elements in memory, while they
    live: where the elements are in memory, and how they are read. Returns None for a tensor without
    memory of its own: without elements, with another layout, on the meta device, or with a storage
    resized to nothing.
    """
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return None
    address = tensor.data_ptr()  # 0 if there are no elements
    if not (address and tensor.untyped_storage().nbytes()):
        return None
    # A view may read its memory negated or conjugated: other elements than those that lie there.
    reads_as = tensor.dtype, tensor.is_neg(), tensor.is_conj()
    return tensor.device, address, tensor.shape, tensor.stride(), *reads_as


def copied_later(tensor: torch.Tensor, devices: Collection[str], is_late: bool) -> torch.Tensor:
    """Returns the tensor, or a copy whose memory is contiguous and on a device of these types, so
    that it can be copied later. If `is_late`, the caller continues before that copy. Small tensors
    are then copied now, because they may be buffers that a forward pass changes.
    """
    # torch copies from a GPU into pageable memory, so the host waits for the current stream here.
    # Asking for the CPU by name would take half as long as all else here.
    if not (tensor.is_cpu or tensor.device.type in devices) or not tensor.is_contiguous():
        return tensor.cpu().contiguous()
    return tensor.clone() if is_late and tensor.nbytes <= BY_VALUE_BYTES else tensor


PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def is_sharded(value: object) -> bool:
    """Returns whether a value is a DTensor, of which each rank holds a part."""
    if type(value) in PLAIN_TENSORS:  # asking a tensor for what it lacks takes long
        return False
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh")


def is_of_several_ranks(value: object) -> bool:
    """Returns whether a value is a tensor of several ranks: a DTensor or a ShardedTensor."""
    if type(value) in PLAIN_TENSORS or not isinstance(value, torch.Tensor):
        return False
    return is_sharded(value) or hasattr(value, "local_shards")
