"""SaveOptions: the arguments that all saves have in common; and, for use inside the library,
subclasses with the options of some kinds of saves only. Both are documented and checked only here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from fastckpt.arguments.checks import (
    BACKENDS,
    ON_ERROR,
    STAGINGS,
    BackendName,
    Fence,
    OnError,
    StagingWay,
    Stripe,
    Striping,
    check_choice,
    check_count,
    check_fence,
    check_flag,
    check_rate,
    check_seconds,
    check_size,
    check_stripe,
    optional,
    shown,
)

Options = TypeVar("Options", bound="WriteOptions")


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """The `options` of all functions that save. Immutable: use dataclasses.replace().

    Args:
        fence: the point at which the caller may change the state. "call": the call returns when
            everything has been copied, so the state may be changed at once. "step": the call
            returns at once, and the next step() of any torch optimizer waits for the copies. If
            other code changes a tensor in place before wait_staged() returns, the save fails with
            StagingConflict.
        on_error: how a failure in the background is reported, in addition to result(). "raise": if
            the error was not retrieved by result() or exception(), the next save of the same kind
            (to files, to the same root) raises it and is not begun; a save of another kind logs it
            as a warning. "warn": the error is logged when it happens, as are errors of earlier
            saves, and training continues.
        durable: sync the files and their directories before the commit. If False, a crash of the
            process still leaves either the old checkpoint or the new one, but a crash of the
            machine may leave neither.
        backend: "auto" chooses by the file system and a probe; "io_uring" and "threads" force that
            backend.
        staging: the path of tensors from a GPU to the file. "host": through pinned host memory.
            "gds": by GPUDirect Storage, from 16 blocks in the GPU's memory; the caller waits while
            these blocks are full (the first time also until the GPU has finished its queued work).
            If cuFile refuses a request, the data goes through the host, with a warning.
            stats.staging and stats.staging_why report the path used.
        staging_bytes: the most staging memory that a save may hold in this process, at least one
            block of 8 MiB, as a number or a text such as "1GiB". A larger save waits for its own
            writes. Default: the process's budget (half of the memory available at the first save,
            or $FASTCKPT_STAGING_BYTES).
        timeout_s: the most seconds that ranks wait for each other, and that a save waits for a
            server, disk or object store that does not respond.

    Raises:
        ValueError, TypeError: an argument is unknown, out of range or of the wrong type; or fence
            is "step" in a Python without the GIL.
    """

    fence: Fence = "call"
    on_error: OnError = "raise"
    durable: bool = True
    backend: BackendName = "auto"
    staging: StagingWay = "host"
    staging_bytes: int | str | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_fence(self.fence)
        check_choice("on_error", self.on_error, ON_ERROR)
        check_flag("durable", self.durable)
        check_choice("backend", self.backend, BACKENDS)
        check_choice("staging", self.staging, STAGINGS)
        _ = self.limit_bytes
        check_seconds("timeout_s", self.timeout_s)

    @property
    def limit_bytes(self) -> int | None:
        """The staging_bytes as a number."""
        return optional(check_size, "staging_bytes", self.staging_bytes)


def check_options(options: object, **refused: str) -> SaveOptions:
    """Returns the argument `options` of a function that saves.

    Args:
        refused: the names of options that must keep their defaults in this function, each with the
            reason.

    Raises:
        TypeError: it is not a SaveOptions.
        ValueError: a refused option is not at its default.
    """
    if not isinstance(options, SaveOptions):
        raise TypeError(
            f"options is {shown(options)} of type {type(options).__name__}, must be a "
            "fastckpt.SaveOptions"
        )
    for name, why in refused.items():
        value, default = getattr(options, name), getattr(SaveOptions, name)
        if value != default:
            raise ValueError(f"{name} is {shown(value)}, must be {shown(default)} here: {why}")
    return options


@dataclass(frozen=True)
class Pacing:
    """Limits on the load of a save on shared storage. None and 0: no limit.

    Args:
        drain_rate, max_writers: see Checkpointer.

    Raises:
        ValueError, TypeError: an argument is out of range or of the wrong type.
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
        limits = []
        if self.rate is not None:
            limits.append(f"drain_rate {self.rate / 1e6:g} MB/s a node")
        if self.max_writers is not None:
            limits.append(f"max_writers {self.max_writers}")
        return ", ".join(limits)


@dataclass(frozen=True, kw_only=True)
class WriteOptions(SaveOptions):
    """SaveOptions, and the arguments of fastckpt.save about how files are laid out and paced.

    Raises:
        ValueError, TypeError: an argument is unknown, out of range or of the wrong type.
    """

    stripe: Stripe = "auto"
    pacing: Pacing = Pacing()

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.striping

    @classmethod
    def of(cls: type[Options], options: SaveOptions, **others: Any) -> Options:
        """Returns these SaveOptions with others that only this class has."""
        common = {field.name: getattr(options, field.name) for field in fields(SaveOptions)}
        return cls(**common, **others)

    @property
    def striping(self) -> Striping:
        """The stripe, with its size in bytes."""
        return check_stripe(self.stripe)
