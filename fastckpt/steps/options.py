"""StepOptions: the arguments of Checkpointer for writing steps and for retention in root and
tier.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fastckpt.arguments.checks import (
    CODECS,
    Codec,
    KeepBest,
    check_choice,
    check_count,
    check_flag,
    check_keep_best,
    check_path,
    optional,
    shown,
)
from fastckpt.arguments.environment import Memory
from fastckpt.arguments.names import listed
from fastckpt.arguments.options import WriteOptions
from fastckpt.formats.manifest import PART
from fastckpt.steps.snapshot import Snapshot

Local: TypeAlias = str | os.PathLike[str] | tuple[str | os.PathLike[str], int] | Memory
KEEP_LOCAL = 2  # steps, if the caller does not say


@dataclass(frozen=True, kw_only=True)
class StepOptions(WriteOptions):
    """Options for writing and keeping steps: the arguments of Checkpointer with the same names.

    Raises:
        ValueError, TypeError: an option is out of range, or excludes another option.
    """

    codec: Codec | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: KeepBest | None = None
    keep_parts: Mapping[str, int] | None = None
    local: Local | None = None
    check_finite: bool = False
    snapshot: Snapshot | None = None
    keep_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("codec", self.codec, CODECS)
        if self.keep_last is not None:
            check_count("keep_last", self.keep_last, ", or None to keep all")
        optional(check_count, "keep_every", self.keep_every)
        optional(check_keep_best, "keep_best", self.keep_best)
        parts = optional(_check_keep_parts, "keep_parts", self.keep_parts)
        object.__setattr__(self, "keep_parts", None if parts is None else dict(parts))
        _ = self.tier
        for name in ("keep_every", "keep_best", "keep_parts"):
            if getattr(self, name) is not None and self.keep_last is None:
                raise ValueError(
                    f"{name} has no effect without keep_last, since all steps are kept"
                )
        if check_flag("check_finite", self.check_finite) and self.staging == "gds":
            raise ValueError(
                'check_finite cannot be combined with staging="gds": numbers are checked in host '
                "memory, which GPUDirect Storage bypasses"
            )

    @property
    def tier(self) -> tuple[str, int, Memory | None] | None:
        """The directory of the local tier, the number of steps to keep there, and the Memory object
        if the tier is in memory; None without a local tier.
        """
        return optional(_check_local, "local", self.local)

    @property
    def parts(self) -> list[str]:
        """The keys of the state that have files of their own, ascending."""
        return sorted(self.keep_parts or ())

    def check_parts(self, state: object) -> None:
        """Raises ValueError unless the state is a dict with every key of keep_parts."""
        keys = [*state] if isinstance(state, dict) else []
        texts = [*map(str, keys)]  # of which names consist
        if missing := [part for part in self.parts if part not in keys or texts.count(part) > 1]:
            raise ValueError(
                f"keep_parts names {missing[0]!r}, but the state has "
                + (f"the keys {listed(map(repr, keys))}" if keys else "no keys")
            )


def common_terms(
    root: str,
    codec: object,
    keep_last: object,
    keep_every: object,
    keep_best: object,
    keep_parts: object,
    local: object,
) -> dict[str, str]:
    """Returns, as texts, the arguments of a Checkpointer that must be the same on all ranks. The
    arguments may be unchecked. The path of `local` may differ between nodes.
    """
    tier = "a directory" if isinstance(local, str | os.PathLike | tuple) else shown(local)
    if isinstance(local, Memory):
        tier = f"Memory(keep={local.keep})"
    elif isinstance(local, tuple) and len(local) == 2:
        tier = f"a directory for {shown(local[1])} steps"
    named = {"codec": codec, "keep_last": keep_last, "keep_every": keep_every}
    texts = {name: shown(value) for name, value in named.items()}
    best = list(keep_best) if isinstance(keep_best, tuple) else keep_best
    parts = keep_parts
    if isinstance(keep_parts, Mapping):
        parts = dict(sorted(keep_parts.items(), key=str))
    return {
        "root": repr(root),
        **texts,
        "keep_best": shown(best),
        "keep_parts": repr(parts),  # not shortened: the files of a step depend on all of it
        "local": tier,
    }


def _check_keep_parts(name: str, value: object) -> Mapping[str, int]:
    """Checks `keep_parts`, which maps keys of the state to numbers of steps."""
    if not isinstance(value, Mapping) or not value:
        raise TypeError(
            f"{name} is {shown(value)}, must be a dict of keys of the state and numbers of steps, "
            'such as {"model": 10}'
        )
    for part, count in value.items():
        check_count(f"{name}[{part!r}]", count)
        if not isinstance(part, str) or PART.fullmatch(part) is None:
            raise ValueError(
                f"{name} has the key {part!r}, which becomes part of a file's name and must "
                f"match {PART.pattern}"
            )
    return value


def _check_local(name: str, value: object) -> tuple[str, int, Memory | None]:
    """Checks `local`; returns the value of StepOptions.tier."""
    if isinstance(value, Memory):
        return value.path, value.keep, value
    if value is Memory or (
        isinstance(value, tuple) and any(isinstance(it, Memory) for it in value)
    ):
        raise TypeError(
            f"{name} is {shown(value)}, must be one Memory(...), with keep= as its argument"
        )
    path, count = value if isinstance(value, tuple) and len(value) == 2 else (value, KEEP_LOCAL)
    return check_path(name, path), check_count(f"the count of {name}", count), None
