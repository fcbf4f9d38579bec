"""torchft: the transports that bring a new replica group up from a healthy one, and fastckpt's.

Its Manager calls send_checkpoint() of the source and recv_checkpoint() of the new group, and at the
end of the source's step disallow_checkpoint(), where HTTPTransport waits for whoever still reads.
PGTransport sends through a process group, into tensors of the new group if it is given them.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torchft==0.2.0"]
# ///

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from saving import blank_like

from fastckpt.cli.bench.benchmark import before_clock
from fastckpt.cli.bench.saves import State, differing, flat_tensors

OURS = "fastckpt"
WAYS = (OURS, "HTTPTransport", "PGTransport", "PGTransport, in place")
TIMEOUT = timedelta(seconds=300)
TENSORS, HEALS, STEP_S = 64, 2, 1.0


def transport(way: str, rank: int, store: str, own: Callable[[], Any]) -> Any:
    """Return one side's transport.

    Args:
        rank: 0 for the source, 1 for the new group.
        store: the address of a TCPStore that both sides reach.
        own: returns the new group's own state.
    """
    if way == OURS:
        from fastckpt.integrations.torchft import Transport

        return Transport(address="127.0.0.1")
    if way == "HTTPTransport":
        from torchft.checkpointing.http_transport import HTTPTransport

        return HTTPTransport(timeout=TIMEOUT, num_chunks=0)
    from torchft.checkpointing.pg_transport import PGTransport
    from torchft.process_group import ProcessGroupGloo

    group = ProcessGroupGloo(timeout=TIMEOUT)
    group.configure(f"{store}/healing", str(rank), rank, 2)
    in_place = own if rank and way.endswith("in place") else None
    return PGTransport(group, TIMEOUT, torch.device("cpu"), state_dict=in_place)


def state_of(nbytes: int) -> State:
    """Return the state of a step, as torchft wraps it; the same at each call."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, nbytes // 4 // TENSORS)
    model = {f"w{at}": torch.randn(count, generator=generator) for at in range(TENSORS)}
    return {"user": {"model": model}, "torchft": {"step": 1}}


def one_side(way: str, rank: int, nbytes: int, port: int) -> dict[str, Any]:
    """Be the source or the new group; returns the clocks of the last time."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    state, row = state_of(nbytes), dict[str, Any]()
    own = blank_like(state) if rank else {}
    its = transport(way, rank, f"127.0.0.1:{port}", lambda: own)
    store.set(f"metadata-{rank}", its.metadata())
    for step in range(1, HEALS + 1):
        for tensor in flat_tensors(own).values():  # stale contents cannot pass for a state
            tensor.zero_()
        before_clock(nbytes)
        store.set(f"ready-{rank}-{step}", "")
        store.wait([f"ready-{each}-{step}" for each in range(2)])
        begun = time.monotonic()  # the same clock in both processes
        if rank:
            metadata = store.get("metadata-0").decode()
            got = its.recv_checkpoint(0, metadata, step, TIMEOUT)
            row = {"end": time.monotonic(), "wrong": differing(got, state)}
            del got
            store.set(f"over-{step}", "")
            continue
        its.send_checkpoint([1], step, state, TIMEOUT)
        sent = time.monotonic()
        time.sleep(max(0.0, begun + STEP_S - sent))  # the rest of the step
        ending = time.monotonic()
        its.disallow_checkpoint()
        row = {"begun": begun, "blocked_s": sent - begun + time.monotonic() - ending}
        store.wait([f"over-{step}"])
    its.shutdown()
    return row
