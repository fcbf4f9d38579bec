"""Options for writing checkpoints: the arguments that fastckpt.save, Checkpointer and the DCP
writer have in common, checked once and never changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastckpt.arguments.checks import (
    BACKENDS,
    STAGINGS,
    BackendName,
    StagingWay,
    Stripe,
    Striping,
    check_choice,
    check_count,
    check_flag,
    check_rate,
    check_size,
    check_stripe,
    optional,
)


@dataclass(frozen=True)
class Pacing:
    """Limits that spare storage which others use, too. None and 0: no limit.

    Args:
        drain_rate, max_writers: as Checkpointer's.

    Raises:
        ValueError, TypeError: one of them is out of range, or of another type.
    """

    drain_rate: float | str | None = None
    max_writers: int | None = None

    def __post_init__(self) -> None:
        optional(check_count, "max_writers", self.max_writers)
        _ = self.rate

    @property
    def rate(self) -> float | None:
        """The drain_rate in bytes per second."""
        return optional(check_rate, "drain_rate", self.drain_rate)

    def __bool__(self) -> bool:
        return bool(self.drain_rate or self.max_writers)

    def text(self) -> str:
        """Returns the limits in words; "" if there are none."""
        asked = []
        if self.rate is not None:
            asked.append(f"drain_rate {self.rate / 1e6:g} MB/s a node")
        if self.max_writers is not None:
            asked.append(f"max_writers {self.max_writers}")
        return ", ".join(asked)


@dataclass(frozen=True)
class WriteOptions:
    """Options for writing files. Each argument is as fastckpt.save's of the same name.

    Raises:
        ValueError, TypeError: one of them is unknown, out of range, or of another type.
    """

    backend: BackendName = "auto"
    durable: bool = True
    staging_bytes: int | str | None = None
    staging: StagingWay = "host"
    stripe: Stripe = "auto"
    pacing: Pacing = Pacing()

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, BACKENDS)
        check_choice("staging", self.staging, STAGINGS)
        check_flag("durable", self.durable)
        _ = self.striping, self.limit_bytes

    @property
    def striping(self) -> Striping:
        """The stripe, with its size in bytes."""
        return check_stripe(self.stripe)

    @property
    def limit_bytes(self) -> int | None:
        """The staging_bytes as a number."""
        return optional(check_size, "staging_bytes", self.staging_bytes)
