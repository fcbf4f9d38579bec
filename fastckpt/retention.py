"""Which committed steps go when another one has been committed.

Responsible for the choice. It must not know how a step is removed, or what it holds.
"""

from __future__ import annotations

from fastckpt.steps import Steps


def retain(steps: Steps, keep: str, keep_last: int, keep_every: int | None) -> list[str]:
    """Removes committed steps that are no longer kept; returns their names.

    Args:
        steps: the root.
        keep: name of the step just committed. Neither it nor what was committed later is removed.
        keep_last: so many steps stay, those committed last, without those known to be damaged.
        keep_every: multiples of this stay.

    A step that is being read (see Steps.hold) stays until a later call.
    """
    found, _faults = steps.committed()
    own = next((item.manifest.sequence for item in found if item.name == keep), 0)
    whole: set[int] = set()  # attempts at a step count once, however saves overlap
    removed = []
    for item in found:
        again = item.manifest.step in whole
        kept = (len(whole) < keep_last and not again) or item.manifest.sequence >= own
        if not steps.is_damaged(item):
            whole.add(item.manifest.step)
        if kept or (keep_every and item.manifest.step % keep_every == 0):
            continue
        if steps.remove_unread(item.name):
            removed.append(item.name)
    return removed


def supersede(steps: Steps, keep: str, step: int) -> None:
    """Removes earlier attempts at a step that was just committed as `keep`."""
    found, _faults = steps.committed()
    own = next((item.manifest.sequence for item in found if item.name == keep), 0)
    for name, manifest in found:
        if manifest.step == step and name != keep and manifest.sequence < own:
            steps.remove_unread(name)
