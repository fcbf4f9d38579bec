"""The recordings as they are kept: files of text, compared with what is recorded now.

Responsible for where they lie, and for what another version of torch may change. It must not know
what is recorded.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from tests.crews.group_crew import Member, Nursery
from tests.kit.paths import TESTS
from tests.recordings.recorder import Naming, difference, left_behind, masked
from tests.recordings.scenes import CASTS
from tests.recordings.stage import play, versions

MEMORY = "/dev/shm"  # what is written need not last
RANKS_IMPORT = "tests.recordings.imports"
FOLDER = TESTS / "data" / "recordings"
AGAIN = "python -m tests.recordings --write"


class Golden:
    """The recordings in the folder.

    Args:
        nursery: of the ranks that play scenes.
    """

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._now: dict[str, str] = {}

    @staticmethod
    def names() -> list[str]:
        return sorted(CASTS)

    @staticmethod
    def kept() -> set[str]:
        """Names of the recordings that are in the folder."""
        return {path.stem for path in FOLDER.glob("*.txt")}

    def recorded(self, name: str) -> str:
        """What a scene does now."""
        cast = CASTS[name]
        if name not in self._now:
            self._now[name] = f"{versions()}\n{self._played(name, cast.ranks)}"
        return self._now[name]

    def _played(self, name: str, ranks: int) -> str:
        """What each rank has done, and the files that are there then."""
        directory = Path(tempfile.mkdtemp(dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
        try:
            if ranks == 1:
                told = [play_by_name(None, name, directory)]
            else:
                crew = self._nursery.lasting_crew(ranks)
                told = crew(play_by_name, name, directory)
            naming = Naming({f"{directory}/": ""})
            return "\n".join(["".join(told) + "== files", *left_behind(directory, naming), ""])
        finally:
            shutil.rmtree(directory)

    def difference(self, name: str) -> str:
        """What is otherwise than in the folder, "" if nothing is."""
        now, path = self.recorded(name), _path(name)
        before = path.read_text() if path.exists() else ""
        head, _, rest = before.partition("\n")
        if before and head != versions():
            before, now = (masked(f"{versions()}\n{text}") for text in (rest, _without_head(now)))
        return difference(before, now, name)

    def write(self, name: str) -> None:
        FOLDER.mkdir(exist_ok=True)
        _path(name).write_text(self.recorded(name))

    def remove_others(self) -> None:
        """Removes what nobody records any more."""
        for name in self.kept() - {*self.names()}:
            _path(name).unlink()


def _without_head(text: str) -> str:
    return text.partition("\n")[2]


def _path(name: str) -> Path:
    return FOLDER / f"{name}.txt"


def play_by_name(member: Member | None, name: str, directory: Path) -> str:
    """Plays a scene on one rank."""
    return play(member, CASTS[name].scene, directory)
