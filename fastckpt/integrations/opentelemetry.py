"""OpenTelemetry metrics of the checkpoints that a Checkpointer commits.

    from fastckpt.integrations.opentelemetry import metrics
    checkpointer = fastckpt.Checkpointer("run", on_commit=metrics())

Responsible for the names and units of the instruments. It must not know where a meter sends what it
is told; nothing is sent unless the program has set up OpenTelemetry's SDK.
"""

from __future__ import annotations

from collections.abc import Callable

from fastckpt.handle import SaveStats
from fastckpt.integrations import require

require("opentelemetry-api", "1.23", "2", __name__)

from opentelemetry.metrics import Meter, get_meter  # noqa: E402

# The clocks of SaveStats, and what they are the seconds of.
_CLOCKS = {
    "stall": "how long the caller of save() was blocked",
    "staged": "from save() until everything was copied",
    "written": "from save() until the last byte was transferred",
    "committed": "from save() until the step was committed",
    "memory_waited": "how long nothing was copied because no staging memory was free",
}


def metrics(meter: Meter | None = None) -> Callable[[int, SaveStats], None]:
    """Returns a callback that counts and times commits: `Checkpointer(on_commit=metrics())`.

    Instruments: the counters `fastckpt.save.count` and `fastckpt.save.size` (bytes that this
    process wrote), the gauge `fastckpt.save.step`, and for each of the clocks stall, staged,
    written, committed and memory_waited the histogram `fastckpt.save.stall` and so on, in seconds.
    Every rank that is given one tells its own; give one to the first rank alone if its clocks are
    enough.

    Args:
        meter: makes the instruments; default: the global provider's meter "fastckpt".

    Returns:
        A function of a step and its SaveStats, which may be called from any thread.

    Raises:
        ImportError: when this module is imported, if opentelemetry-api is not installed.
    """
    meter = get_meter("fastckpt") if meter is None else meter
    count = meter.create_counter("fastckpt.save.count", "{save}", "steps committed")
    size = meter.create_counter("fastckpt.save.size", "By", "bytes written by this process")
    newest = meter.create_gauge("fastckpt.save.step", "{step}", "the step committed last")
    clocks = {
        f"{name}_s": meter.create_histogram(f"fastckpt.save.{name}", "s", meaning)
        for name, meaning in _CLOCKS.items()
    }

    def tell(step: int, stats: SaveStats) -> None:
        count.add(1)
        size.add(stats.nbytes)
        newest.set(step)
        for clock, histogram in clocks.items():
            seconds = getattr(stats, clock)
            if seconds is not None:
                histogram.record(seconds)

    return tell
