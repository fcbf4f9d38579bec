"""matplotlib for --png, which draws into files and is loaded only when something is drawn."""

from __future__ import annotations

from typing import Any

from fastckpt.errors import CheckpointError


def load_pyplot() -> Any:
    """Returns matplotlib.pyplot.

    Raises:
        CheckpointError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise CheckpointError("--png needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
