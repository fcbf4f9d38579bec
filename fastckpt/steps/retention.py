"""Retention: the choice of the steps to remove after a commit."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fastckpt.arguments.checks import MODES, KeepBest, Mode, check_choice, check_metrics
from fastckpt.arguments.names import listed
from fastckpt.errors import StorageError
from fastckpt.formats.manifest import validate_metadata, validate_metrics
from fastckpt.formats.step_names import step_of
from fastckpt.steps.options import StepOptions
from fastckpt.steps.store import Committed, StepStore, in_order
from fastckpt.storage.keep import Entry, Policy, best_first, victims

log = logging.getLogger("fastckpt")


def tidy(steps: StepStore, keep: str, options: StepOptions) -> None:
    """Removes superfluous steps after a commit was reported. A step that is being read (see
    StepStore.hold) stays until a later call. For `steps`, `keep` and `options` see superfluous().
    """
    try:
        steps.after_commit()
        # Listing takes time on network file systems: not unless there may be something to remove.
        if options.keep_last is None and not steps.has_another(keep):
            return
        committed, _faults = steps.committed()
        stuck: set[int] = set()  # steps with an older attempt that stays and would come back
        needed: set[str] = set()  # nonces of steps from which others that stay are differences
        going = superfluous(steps, committed, keep, options)
        if going and steps.lease is not None and steps.lease.is_lost():
            log.warning(
                "%r was taken over by another job, so old steps are not removed", steps.root
            )
            going = []
        if going and options.keep_best is not None:
            _warn_of_no_best(steps, committed, options.keep_best)
        if options.keep_parts:
            going = _thinned(steps, going, committed, options.keep_parts)
        _warn_of_others(steps, going, committed, options.keep_parts or {})
        for name, manifest in _bases_last(going, committed):
            stays = step_of(name) in stuck or manifest.nonce in needed
            try:
                is_gone = not stays and steps.remove(name, manifest.nonce)
            except StorageError as error:  # others may go all the same
                log.warning("an old step could not be removed: %s", error)
                is_gone = False
            if not is_gone:
                stuck.add(step_of(name))
                needed |= manifest.bases
    except (StorageError, OSError) as error:
        log.warning("old steps could not be removed: %s", error)


def _thinned(
    steps: StepStore,
    going: list[str],
    committed: list[Committed],
    keep_parts: Mapping[str, int],
) -> list[str]:
    """Reduces the newest of the steps that are to go to their kept parts; returns those that go
    entirely. A step that is pinned or being read does not count, and stays as it is.
    """
    numbers = {item.manifest.step for item in committed if item.name not in going}
    counts = dict(keep_parts)
    removed = []
    for item in committed:
        name, manifest = item
        if name not in going:
            continue
        parts = frozenset(part for part, count in counts.items() if count > 0) & manifest.thinnable
        is_good = steps.verdicts.may_stay_alone(item) and manifest.step not in numbers
        if not parts or not is_good:  # else an older attempt would come back with its step
            removed.append(name)
        elif steps.is_thinned(item, parts) or _thin(steps, item, parts):
            numbers.add(manifest.step)
            counts = {part: count - (part in parts) for part, count in counts.items()}
    return removed


def _thin(steps: StepStore, item: Committed, parts: frozenset[str]) -> bool:
    try:
        return steps.thin(item.name, item.manifest.nonce, parts)
    except StorageError as error:  # others may be thinned all the same
        log.warning("an old step could not be reduced to %s: %s", listed(sorted(parts)), error)
        return False


def _warn_of_others(
    steps: StepStore, going: list[str], committed: list[Committed], keep_parts: Mapping[str, int]
) -> None:
    """Warns once if steps are removed that were thinned to none of the keys that this job keeps."""
    thinned = [item.manifest.kept for item in committed if item.name in going]
    others = [keys for keys in thinned if keys is not None and not {*keys} & keep_parts.keys()]
    if others and not steps.warned_of_parts:
        steps.warned_of_parts = True
        log.warning(
            "%r: %d steps that an earlier job has thinned to %s are removed, because keep_parts of "
            "this job does not name these keys (this warning is logged only once)",
            steps.root,
            len(others),
            listed(sorted({repr(key) for keys in others for key in keys})),
        )


def _warn_of_no_best(steps: StepStore, committed: list[Committed], by: KeepBest) -> None:
    """Warns once, before steps are removed, if no step has the metric of keep_best."""
    scores = [_entry(steps, item, by).score for item in committed]
    if scores.count(None) == len(scores) and not steps.warned_of_metric:
        steps.warned_of_metric = True
        log.warning(
            "%r: no step has the metric %r that keep_best uses, so older steps are removed and "
            "none is kept as one of the best: pass this metric to save(metrics=) (this warning is "
            "logged only once)",
            steps.root,
            by[0],
        )


def superfluous(
    steps: StepStore, committed: list[Committed], keep: str, options: StepOptions
) -> list[str]:
    """Returns the names of the committed steps to remove: steps beyond keep_last, and all attempts
    at the step just committed except the newest. After a late drain, the newest attempt may not be
    `keep`.

    Steps of four kinds do not count towards keep_last: thinned steps, steps that are damaged or may
    not be durable, and the following two. Steps that another job committed since this job began
    replace no other step, and stay until this job restores. Steps that could not be read in the
    last attempt stay, because they may be intact.

    Args:
        steps: the root.
        committed: the committed steps, newest first.
        keep: the name of the step just committed. It stays, and so do all steps committed after it.
        options: how many of the newest steps stay (None: all), which multiples, and which best
            steps.
    """
    own = next((item.manifest for item in committed if item.name == keep), None)
    if own is None:  # somebody has removed it, and may be about to remove others
        return []
    entries = [_entry(steps, item, options.keep_best) for item in committed]
    for place, item in enumerate(committed):
        if not steps.has_seen(item):
            entries[place] = entries[place]._replace(number=None, counts=False, is_pinned=True)
        if options.keep_s and _age_s(item) < options.keep_s:
            entries[place] = entries[place]._replace(is_pinned=True)
    going = victims([each for each in entries if each.number == own.step], Policy(1))
    if options.keep_last is not None:
        rest = [
            each._replace(is_pinned=each.is_pinned or item.manifest.sequence >= own.sequence)
            for each, item in zip(entries, committed, strict=True)
            if each.name not in going
        ]
        top = options.keep_best[2] if options.keep_best else 0
        going += victims(rest, Policy(options.keep_last, options.keep_every, top=top))
    return _without_bases(going, committed)


def _age_s(item: Committed) -> float:
    created = datetime.fromisoformat(item.manifest.created.replace("Z", "+00:00"))
    return time.time() - created.timestamp()


def _without_bases(going: list[str], committed: list[Committed]) -> list[str]:
    """Returns `going` without the steps from which others that stay are differences."""
    named = {item.manifest.nonce: item for item in committed}
    needed, open_ends = set[str](), [item for item in committed if item.name not in going]
    while open_ends:
        bases = [named[each] for each in open_ends.pop().manifest.bases if each in named]
        open_ends += [item for item in bases if item.name not in needed]
        needed.update(item.name for item in bases)
    return [name for name in going if name not in needed]


def _bases_last(going: list[str], committed: list[Committed]) -> list[Committed]:
    """Returns the steps to remove, the oldest first, but each after those that differ from it:
    whenever this process is killed, or a reader holds one, a step that is left has its bases.
    """
    named = {item.name: item for item in committed}
    items = [named[name] for name in reversed(going)]
    places = {item.manifest.nonce: place for place, item in enumerate(items)}
    for item in sorted(items, key=in_order):  # a chain goes when its first step is due
        earlier = [places[base] for base in item.manifest.bases if base in places]
        places[item.manifest.nonce] = min([places[item.manifest.nonce], *earlier])
    chains: dict[int, list[Committed]] = {}
    for item in items:
        chains.setdefault(places[item.manifest.nonce], []).append(item)
    return [
        item
        for _place, chain in sorted(chains.items())
        for item in sorted(chain, key=in_order, reverse=True)
    ]


def criterion(keep_best: KeepBest | None, metric: str | None, mode: Mode | None) -> KeepBest:
    """Returns the criterion of best(), from the arguments or else from keep_best. Raises
    ValueError.
    """
    check_choice("mode", mode, (None, *MODES))
    if metric is None and keep_best is None:
        raise ValueError(
            'best() needs a metric: pass one, or keep_best=("val_loss", "min", 3) to Checkpointer'
        )
    if keep_best is not None and metric in (None, keep_best[0]):
        return (keep_best[0], mode or keep_best[1], 1)
    return (str(metric), mode or "min", 1)


def best(steps: StepStore, by: KeepBest) -> int | None:
    """Returns the committed step with the best metric, ignoring steps that retention must not rely
    on; None if no step has the metric. Raises StorageError.
    """
    reliable = [item for item in steps.survey()[0] if steps.verdicts.may_stay_alone(item)]
    entries = best_first([_entry(steps, item, by)._replace(counts=True) for item in reliable])
    return entries[0].number if entries else None


def checked_metrics(
    steps: StepStore, step: int, metrics: object, by: KeepBest | None
) -> dict[str, float | str]:
    """Checks metrics, which may be None; returns them in the manifest's form. Warns once if the
    metric of keep_best is missing. Raises ValueError, TypeError.
    """
    result = {} if metrics is None else check_metrics(metrics)
    if result:
        validate_metrics(result)
    if result and by and by[0] not in result and not steps.warned_of_metric:
        steps.warned_of_metric = True
        log.warning(
            "%r: the metrics of step %d are %s, but a step without %r, which keep_best uses, is "
            "never kept as one of the best (this warning is logged only once)",
            steps.root,
            step,
            listed(map(repr, result)),
            by[0],
        )
    return result


def checked_metadata(metadata: Any) -> Any:
    """Returns a copy of metadata, which may be None. Raises ValueError unless it is small JSON."""
    validate_metadata(metadata)
    return copy.deepcopy(metadata)


def _entry(steps: StepStore, item: Committed, by: KeepBest | None) -> Entry:
    """Returns a step's entry for the retention policy. Pins are checked later, when the step is
    removed.
    """
    verdicts, score, parts = steps.verdicts, None, item.manifest.kept
    if by and not isinstance(value := item.manifest.metrics.get(by[0]), str | None):
        score = -value if by[1] == "min" else value
    counts = verdicts.may_stay_alone(item) and parts is None
    return Entry(item.name, item.manifest.step, counts, verdicts.is_unread(item), score)
