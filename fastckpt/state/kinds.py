"""The kinds of tensors: plain ones, and those of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Collection, Hashable

import torch

from fastckpt.plan.image import BY_VALUE_BYTES

# Of a tensor with elements that has none, in words that follow "is".
NO_MEMORY = "without memory, as FSDP's parameters are while they are not gathered"


def memory_of(tensor: torch.Tensor) -> tuple[Hashable, ...] | None:
    """Returns what tensors have in common that are the same elements, while they live: where these
    lie in memory, and how they are read there. Returns None of a tensor without memory to tell it
    by: of no elements, of another layout, on the meta device, or of a storage that was resized to
    nothing.
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
    """Returns a tensor whose memory can be copied later as it lies, on a device of one of these
    types: the same, or a copy. If `is_late`, the caller goes on before that: small tensors are
    copied now, since they may be buffers that a forward pass changes.
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
