"""What is at a path: the list of all kinds of checkpoints, for whoever opens one, verifies it, or
removes what its saves have left. Nothing else tells kinds apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from fastckpt.errors import StorageError
from fastckpt.formats import distcp, file_list
from fastckpt.formats.step_names import NAME
from fastckpt.lazy.kind import Debris, Kind, Part, Place, bounded, refused
from fastckpt.lazy.kind_of_directories import Dcp, HuggingFace, Listed, MegatronRun
from fastckpt.lazy.kind_of_files import File, Files
from fastckpt.lazy.kind_of_steps import (
    DamagedStep,
    Run,
    Step,
    UncommittedStep,
    is_export,
    mention,
)
from fastckpt.saving import pipeline
from fastckpt.steps.no_steps import is_step, what_is_there
from fastckpt.steps.root import Steps

RUN = Run()
_FILE, _STEP, _UNCOMMITTED, _LISTED = File(), Step(), UncommittedStep(), Listed()
_DCP, _FILES = Dcp(_FILE), Files(_FILE)
# In the order in which a path is taken for one: its own records come before the files in it.
KINDS: tuple[Kind, ...] = (
    _FILE,
    _STEP,
    _LISTED,
    _DCP,
    HuggingFace(),
    _UNCOMMITTED,
    _FILES,
    MegatronRun(_DCP),
    DamagedStep(),
    RUN,
)
_IN_DIRECTORIES = (_LISTED, _DCP, _FILES)  # of which there may be several in one directory


def kind_of(place: Place) -> Kind:
    """Returns the kind that a path is opened as. What is none is opened as a run, which says what
    there is instead. Raises StorageError if a directory cannot be listed.
    """
    return next((kind for kind in KINDS if kind.recognise(place)), RUN)


def hint_for_load(path: str) -> str:
    """Returns how to load a directory that was given as a file; "" if it is no known checkpoint."""
    current = pipeline.current()
    place = Place(current.storage, current.staging, path)
    try:
        found = next((kind for kind in KINDS if kind.recognise(place)), None)
    except StorageError:  # this hint only adds to an error that the caller raises
        return ""
    return "" if found is None else found.hint.format(path=path)


def parts_at(place: Place) -> Iterator[Part]:
    """Yields what a path holds, to be verified. Of a run, steps without a manifest come first, then
    steps from the oldest on, then what others may have put beside them.
    """
    if not place.is_directory:
        yield from _FILE.verify(place)
        return
    if alone := [*_STEP.verify(place)] or [*_UNCOMMITTED.verify(place)]:
        yield from alone
        return
    is_empty = True
    for part in chain(RUN.verify(place), _beside_steps(place)):
        is_empty = is_empty and part.check is mention
        yield part
    if is_empty:
        what = what_is_there(Steps(place.storage, place.path))
        why = f"{place.path!r} holds no committed step and no {distcp.SUFFIX} file: {what}"
        yield refused(place.path, why)


def _beside_steps(place: Place) -> Iterator[Part]:
    """Yields what lies in a directory, or in one below it, and is no step: checkpoints of
    frameworks, exports, and single files.
    """
    yield from _in_directory(place)
    if place.has(file_list.NAME, link=True):
        return
    names = place.storage.names(place.path, directories=True)
    below = [name for name in names if is_export(place, name) or not _is_passed_over(name)]
    looked_into, passed_over = bounded(place.path, below)
    for name in looked_into:
        inner = place.below(name)
        if is_step(inner.path):  # a copy that has a name of its own
            yield from _STEP.verify(inner)
        else:
            yield from _in_directory(inner)
    yield from passed_over


def _is_passed_over(name: str) -> bool:
    return name[0] == "." or NAME.match(name) is not None


def _in_directory(place: Place) -> Iterator[Part]:
    for kind in _IN_DIRECTORIES:
        yield from kind.verify(place)


def debris_at(place: Place) -> Iterator[Debris]:
    """Yields what saves of any kind have left in a directory, first those of steps."""
    for kind in reversed(KINDS):
        yield from kind.debris(place)
