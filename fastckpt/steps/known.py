"""Known, what a Checkpointer knows of the save behind the name of a step's directory, until another
save takes the name; and Begun, the files that it has open in a directory that it is writing to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fastckpt.formats.manifest import Manifest

UNSEEN = (0, 0, 0)  # the version of a manifest that was written here and not read


@dataclass(slots=True)
class Known:
    """The knowledge of one name. It is about one save: another one of that name has its own.

    Attributes:
        manifest: of the committed step, if one is known.
        version: of the manifest's file, as it was read.
        is_damaged: whether the step was read and found damaged.
        is_unread: whether the step may be whole, but could last not be read.
        is_doubtful: whether it was committed here, but perhaps not durably.
        is_begun: whether a save of this process is writing to the directory.
        is_abandoned: whether a save of this process has failed there.
        is_left: whether only files that are still open keep the directory.
    """

    manifest: Manifest | None = None
    version: tuple[int, int, int] = UNSEEN
    is_damaged: bool = False
    is_unread: bool = False
    is_doubtful: bool = False
    is_begun: bool = False
    is_abandoned: bool = False
    is_left: bool = False

    def note_read(self, *, is_whole: bool) -> None:
        """Remembers that the step was read, and what was found."""
        self.is_damaged, self.is_unread = not is_whole, False

    def may_stay_alone(self) -> bool:
        """Returns whether older steps may be removed on the account of this one."""
        return not (self.is_damaged or self.is_unread or self.is_doubtful)


class Begun(NamedTuple):
    """A directory that a save is writing to.

    Attributes:
        name: the directory's name within the root.
        manifest_fd: the manifest under its temporary name; its lock says that the save is alive.
        temporary: the path of that.
    """

    name: str
    manifest_fd: int
    temporary: str
