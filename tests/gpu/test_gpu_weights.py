"""Promise: versions of weights on a GPU are published, in full and as differences, as those of the
host are.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fastckpt import WeightPublisher, WeightSubscriber
from tests.kit.accelerator import here
from tests.kit.cuda_stub import CudaStub

WAIT_S = 60.0


def test_versions_of_a_gpu_come_back_bit_for_bit(gpu: CudaStub, disk: Path) -> None:
    """The difference is made in staging memory, after the bytes have arrived there."""
    random = torch.Generator().manual_seed(0)
    host = {
        "large": torch.randn(5_000_000, generator=random).to(torch.bfloat16),
        "small": torch.randn(7, generator=random),
        "on the host": torch.randn(2_000_000, generator=random),
    }
    with WeightPublisher(disk / "w") as publisher, WeightSubscriber(disk / "w") as subscriber:
        for version in (1, 2, 3):
            for tensor in host.values():
                tensor[version::50] += 1
            state = {
                name: tensor if name == "on the host" else tensor.to(here())
                for name, tensor in host.items()
            }
            stats = publisher.publish(state, version).result(WAIT_S)
            assert stats.staging == "pinned"
            assert (stats.stored_nbytes < stats.nbytes / 2) == (version > 1)
            update = subscriber.next()
            assert update is not None and update.version == version
            for name, tensor in update:
                assert torch.equal(tensor.view(torch.uint8), host[name].view(torch.uint8)), name
