"""Lets Megatron-core train on a machine without a GPU, over gloo: for trying things out and for CI.

Megatron-core asks for CUDA devices, streams and synchronisation by name. `on_cpu()` answers those
calls with the CPU; the model, its parallelism, the distributed optimizer and its checkpoints are
Megatron's own code. It must not be used where there is a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed import Work, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _CoalescingManager, _IllegalWork
from torch.overrides import TorchFunctionMode


class _Event:
    """An event that has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Stream:
    """A stream on which everything has happened already."""

    def record_event(self, *_events: Any) -> _Event:
        return _Event()

    def wait_stream(self, *_others: Any) -> None: ...

    def wait_event(self, *_events: Any) -> None: ...

    def synchronize(self) -> None: ...


class _CudaIsCpu(TorchFunctionMode):
    """A mode that makes tensors on the CPU where a CUDA device is asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.device and str(args[:1]).startswith("('cuda"):
            args = ("cpu",)
        result = func(*args, **kwargs)
        if isinstance(result, Work) and not isinstance(result, _IllegalWork):
            result.wait()  # Megatron relies on streams, which are none here, for order
        return result


class _Coalesced(_CoalescingManager):
    """Collectives begun together, each of which is waited for at once, as single ones are."""

    def append(self, work: Work | None = None) -> None:
        if work is not None:
            work.wait()


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Makes Megatron-core find one device in the body: the CPU."""
    tensor_type = torch.Tensor.type

    def cuda_named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Names a CUDA type, as the mixed precision optimizer sorts tensors by that name."""
        name = tensor_type(self, *args, **kwargs)
        if not args and not kwargs and not name.startswith("torch.cuda."):
            name = name.replace("torch.", "torch.cuda.", 1)
        return name

    cuda: dict[str, Any] = {
        "synchronize": lambda *_: None,
        "current_device": lambda: "cpu",
        "set_device": lambda *_: None,
        "device_count": lambda: 1,
        "current_stream": lambda *_: _Stream(),
        "Stream": lambda *_, **__: _Stream(),
        "stream": lambda _stream: contextlib.nullcontext(),
        "Event": _Event,
        "get_rng_state": lambda *_: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
    }
    mesh_of = DeviceMesh.from_group

    def mesh_on_cpu(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return mesh_of(group, "cpu", *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name, stand_in in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch.object(DeviceMesh, "from_group", mesh_on_cpu))
        stack.enter_context(mock.patch.object(distributed_c10d, "_CoalescingManager", _Coalesced))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self))
        stack.enter_context(mock.patch.object(torch.Tensor, "type", cuda_named))
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        nothing = contextlib.nullcontext
        stack.enter_context(mock.patch.object(CudaRNGStatesTracker, "fork", lambda *_: nothing()))
        stack.enter_context(_CudaIsCpu())
        yield
