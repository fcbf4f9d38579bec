"""Reports saves to OpenTelemetry: spans of phases, metrics of saves, bytes, stalls and failures.

Responsible for the measurements and their names. The program's own OpenTelemetry SDK decides where
they are sent.
"""

from __future__ import annotations

import time

from fastckpt.errors import SaveCancelled
from fastckpt.integrations import require
from fastckpt.saving.handle import InnerHandle, SaveHandle

require("opentelemetry-api", "1.23", "2", __name__)

from opentelemetry import metrics, trace  # noqa: E402
from opentelemetry.trace import Status, StatusCode  # noqa: E402

__all__ = ["Telemetry"]

_SCOPE = "fastckpt"


class Telemetry:
    """A callback for save handles that reports each save when it has ended:

        telemetry = Telemetry()
        checkpointer.save(step, state).add_done_callback(telemetry)

    Each process reports its own part, so in a job give each resource an attribute with the rank.
    The report is made on the thread of the save.

    A span "fastckpt.save" lasts from the call of save() to the commit. Its children are the phases
    "capture" and "copy" (until the object may change), "write", "sync", "commit" (the agreement of
    ranks and the rename) and, with a local tier, "drain" (from the commit on the nodes to the
    commit in the root). Copies and writes overlap. The span of a failed save has the error as its
    event and status.

    The metrics:

    | name | kind, unit | |
    |---|---|---|
    | fastckpt.saves | counter, {save} | by `outcome`: "committed", "failed" or "cancelled" |
    | fastckpt.save.size | counter, By | bytes that this process wrote for committed saves |
    | fastckpt.save.stall | histogram, s | how long the caller was blocked |
    | fastckpt.save.durable | histogram, s | from the call of save() to the commit |
    | fastckpt.save.drain | histogram, s | from the commit on the nodes to the commit in the root |

    Args:
        meter_provider, tracer_provider: the providers that receive metrics and spans; default:
            OpenTelemetry's global providers.
    """

    def __init__(
        self,
        meter_provider: metrics.MeterProvider | None = None,
        tracer_provider: trace.TracerProvider | None = None,
    ) -> None:
        meter = metrics.get_meter(_SCOPE, meter_provider=meter_provider)
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        self._saves = meter.create_counter("fastckpt.saves", "{save}", "saves that have ended")
        self._size = meter.create_counter(
            "fastckpt.save.size", "By", "bytes written by this process"
        )
        self._stall = meter.create_histogram(
            "fastckpt.save.stall", "s", "time for which the caller was blocked"
        )
        self._durable = meter.create_histogram(
            "fastckpt.save.durable", "s", "time until the commit"
        )
        self._drain = meter.create_histogram(
            "fastckpt.save.drain", "s", "time for copying from nodes to the root"
        )

    def __call__(self, handle: SaveHandle) -> None:
        """Reports a save that has ended; called by its handle."""
        assert isinstance(handle, InnerHandle), "a callback of a save"
        stats, error = handle.stats, handle.failure()
        outcome = "committed"
        if error is not None:
            outcome = "cancelled" if isinstance(error, SaveCancelled) else "failed"
        self._saves.add(1, {"outcome": outcome})
        if error is None:
            self._size.add(stats.nbytes)
            self._durable.record(stats.committed_s or 0.0)
        self._stall.record(stats.stall_s or 0.0)
        for name, begin_s, end_s in stats.spans():
            if name == "drain":
                self._drain.record(end_s - begin_s)
        self._trace(handle, outcome, error)

    def _trace(self, handle: InnerHandle, outcome: str, error: BaseException | None) -> None:
        stats, elapsed_s = handle.stats, handle.elapsed_s()
        called_ns = time.time_ns() - _ns(elapsed_s)
        attributes: dict[str, str | int] = {
            "fastckpt.path": handle.path,
            "fastckpt.outcome": outcome,
            "fastckpt.size": stats.nbytes,
            "fastckpt.ranks": stats.ranks,
            "fastckpt.backend": stats.backend,
        }
        parent = self._tracer.start_span(
            "fastckpt.save", start_time=called_ns, attributes=attributes
        )
        context = trace.set_span_in_context(parent)
        for name, begin_s, end_s in stats.spans():
            begin_ns, end_ns = called_ns + _ns(begin_s), called_ns + _ns(end_s)
            child = self._tracer.start_span(f"fastckpt.{name}", context, start_time=begin_ns)
            child.end(end_ns)
        if error is not None:
            parent.record_exception(error)
            parent.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        parent.end(called_ns + _ns(stats.committed_s if stats.committed_s else elapsed_s))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
