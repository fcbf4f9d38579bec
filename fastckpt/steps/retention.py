"""Retention: the choice of the steps to remove when another one has been committed."""

from __future__ import annotations

import logging

from fastckpt.arguments.checks import MODES, KeepBest, Mode, check_choice, check_metrics
from fastckpt.arguments.names import listed
from fastckpt.errors import StorageError
from fastckpt.formats.manifest import validate_metrics
from fastckpt.formats.step_names import step_of
from fastckpt.steps.options import StepOptions
from fastckpt.steps.store import Committed, StepStore
from fastckpt.storage.keep import Entry, Policy, best_first, victims

log = logging.getLogger("fastckpt")


def tidy(steps: StepStore, keep: str, options: StepOptions) -> None:
    """Removes steps that a commit has made superfluous, after the result was reported. A step that
    is being read (see StepStore.hold) stays until a later call.
    `steps` and `keep` are as superfluous()'s; `options` say which steps stay.
    """
    try:
        steps.after_commit()
        # Listing takes time on network file systems: not unless there may be something to remove.
        if options.keep_last is None and not steps.has_another(keep):
            return
        committed, _faults = steps.committed()
        nonces = {item.name: item.manifest.nonce for item in committed}
        stuck: set[int] = set()  # steps with an older attempt that stays and would come back
        going = superfluous(steps, committed, keep, options)
        if going and steps.lease is not None and steps.lease.is_lost():
            log.warning("%r was taken over by another job: old steps are not removed", steps.root)
            going = []
        if going and options.keep_best is not None:
            _warn_of_no_best(steps, committed, options.keep_best)
        for name in reversed(going):
            try:
                is_gone = step_of(name) not in stuck and steps.remove(name, nonces[name])
            except StorageError as error:  # others may go all the same
                log.warning("an old step could not be removed: %s", error)
                is_gone = False
            if not is_gone:
                stuck.add(step_of(name))
    except (StorageError, OSError) as error:
        log.warning("old steps could not be removed: %s", error)


def _warn_of_no_best(steps: StepStore, committed: list[Committed], by: KeepBest) -> None:
    """Warns once, before steps are removed, if no step has the metric of keep_best."""
    scores = [_entry(steps, item, by).score for item in committed]
    if scores.count(None) == len(scores) and not steps.warned_of_metric:
        steps.warned_of_metric = True
        log.warning(
            "%r: no step has the metric %r that keep_best uses, so older steps are removed and "
            "none is kept as one of the best: pass it to save(metrics=) (this warning comes only "
            "once)",
            steps.root,
            by[0],
        )


def superfluous(
    steps: StepStore, committed: list[Committed], keep: str, options: StepOptions
) -> list[str]:
    """Returns the names of the committed steps that need not stay: steps beyond keep_last, and all
    attempts but the newest at the step just committed. (If that was drained late, the newest is not
    `keep`.)

    Some steps do not count: those that are known to be damaged, or may not be durable; those that
    another job has committed meanwhile, which replace nothing and stay until this job restores; and
    those that could not be read at the last try, which stay since they may be whole.

    Args:
        steps: the root.
        committed: the committed steps, the one committed last first.
        keep: the name of the step just committed. It stays, and so do all committed after it.
        options: how many of the last ones stay (None: all), which multiples, and which best ones.
    """
    own = next((item.manifest for item in committed if item.name == keep), None)
    if own is None:  # somebody has removed it, and may be about to remove others
        return []
    entries = [_entry(steps, item, options.keep_best) for item in committed]
    for place, item in enumerate(committed):
        if not steps.has_seen(item):
            entries[place] = entries[place]._replace(number=None, counts=False, is_pinned=True)
    going = victims([each for each in entries if each.number == own.step], Policy(1))
    if options.keep_last is not None:
        rest = [
            each._replace(is_pinned=each.is_pinned or item.manifest.sequence >= own.sequence)
            for each, item in zip(entries, committed, strict=True)
            if each.name not in going
        ]
        top = options.keep_best[2] if options.keep_best else 0
        going += victims(rest, Policy(options.keep_last, options.keep_every, top=top))
    return going


def criterion(keep_best: KeepBest | None, metric: str | None, mode: Mode | None) -> KeepBest:
    """Returns the criterion of best(), from keep_best and the arguments. Raises ValueError."""
    check_choice("mode", mode, (None, *MODES))
    if metric is None and keep_best is None:
        raise ValueError(
            'best() needs a metric: pass one, or keep_best=("val_loss", "min", 3) to Checkpointer'
        )
    if keep_best is not None and metric in (None, keep_best[0]):
        return (keep_best[0], mode or keep_best[1], 1)
    return (str(metric), mode or "min", 1)


def best(steps: StepStore, by: KeepBest) -> int | None:
    """Returns the best of the committed steps, as far as is known; None if none has the metric.
    Raises StorageError.
    """
    entries = [_entry(steps, item, by) for item in steps.survey()[0]]
    return next((each.number for each in best_first(entries) if each.counts), None)


def checked_metrics(
    steps: StepStore, step: int, metrics: object, by: KeepBest | None
) -> dict[str, float | str]:
    """Returns the metrics for a manifest, after a check; `metrics` may be None. Warns once if they
    lack the metric of keep_best. Raises ValueError, TypeError.
    """
    result = {} if metrics is None else check_metrics(metrics)
    if result:
        validate_metrics(result)
    if result and by and by[0] not in result and not steps.warned_of_metric:
        steps.warned_of_metric = True
        log.warning(
            "%r: the metrics of step %d are %s; without %r, which keep_best uses, a step is never "
            "one of the best (this warning comes only once)",
            steps.root,
            step,
            listed(map(repr, result)),
            by[0],
        )
    return result


def _entry(steps: StepStore, item: Committed, by: KeepBest | None) -> Entry:
    """Returns a step as the rule of retention sees it. Pins are checked at its removal."""
    verdicts, score = steps.verdicts, None
    if by and not isinstance(value := item.manifest.metrics.get(by[0]), str | None):
        score = -value if by[1] == "min" else value
    counts = verdicts.may_stay_alone(item)
    return Entry(item.name, item.manifest.step, counts, verdicts.is_unread(item), score)
