"""StepOptions: the arguments of Checkpointer about how steps are written, and which stay where."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fastckpt.arguments.checks import (
    CODECS,
    Codec,
    check_choice,
    check_count,
    check_flag,
    check_path,
    optional,
)
from fastckpt.options import WriteOptions

Compression: TypeAlias = Literal["zstd", "planes"]
KEEP_LOCAL = 2  # steps, if the caller does not say


@dataclass(frozen=True)
class StepOptions(WriteOptions):
    """Options for writing and keeping steps: arguments of Checkpointer of the same names.

    Raises:
        ValueError, TypeError: one of them is out of range, or excludes another one.
    """

    codec: Codec | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    local: str | os.PathLike[str] | None = None
    keep_local: int | None = None
    check_finite: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("codec", self.codec, CODECS)
        if self.keep_last is not None:
            check_count("keep_last", self.keep_last, ", or None to keep all")
        optional(check_count, "keep_every", self.keep_every)
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError("keep_every without keep_last: all steps are kept anyway")
        optional(check_count, "keep_local", self.keep_local)
        if self.local_path is None and self.keep_local is not None:
            raise ValueError("keep_local without local: there is no local tier to keep steps in")
        if self.reuses and self.staging == "gds":
            raise ValueError(
                'codec="reuse" with staging="gds": what is hashed has to be in host memory'
            )
        if check_flag("check_finite", self.check_finite) and self.staging == "gds":
            raise ValueError(
                'check_finite with staging="gds": numbers are looked at in host memory, past which '
                "GPUDirect Storage goes"
            )

    @property
    def local_path(self) -> str | None:
        """The directory `local` as a path; None if there is no local tier."""
        return optional(check_path, "local", self.local)

    @property
    def reuses(self) -> bool:
        """Whether shards share on the disk what they have in common with those of the last step."""
        return self.codec == "reuse"

    @property
    def compression(self) -> Compression | None:
        """The codec that compresses the blocks of shards, if one does."""
        return None if self.codec == "reuse" else self.codec
