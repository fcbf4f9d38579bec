"""Chance, by a seed: `make test` takes the same few rounds each time, `make torture` new and many.

A storm that fails in torture is repeated by its seed, and one round of it alone by its number:
`make torture SEED=n PYTEST_ARGS="-k name --round k"`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
SUITE_SEED = 20261122
# How many times as many examples as in `make test`: one more for so many seconds of torture, so
# that no property takes much longer than the whole of it.
_EXAMPLES_S, _TIMES_MAX = 10.0, 90


class Storm:
    """Rounds of one test.

    Args:
        name: of the test, so that tests differ from each other under one seed.
        seed: of this run.
        deadline: by time.monotonic(), of torture; None: this is `make test`.
        only: the number of the only round to run; None: all.
    """

    def __init__(self, name: str, seed: int, deadline: float | None, only: int | None) -> None:
        self._name = name
        self._seed = seed
        self._deadline = deadline
        self._only = only

    def rounds(self, suite: int, torture: int) -> Iterator[random.Random]:
        """A source of chance for each of so many rounds in `make test`, and in `make torture`, the
        last of which are left out when its time is over.
        """
        count = suite if self._deadline is None else torture
        for number in range(count) if self._only is None else [self._only]:
            if number >= suite and self._only is None and self._is_over():
                break
            print(f"round {number} of seed {self._seed}")  # pytest shows the last one of a failure
            yield random.Random(f"{self._seed} {self._name} {number}")

    def _is_over(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def some(self, items: Sequence[T], suite: int) -> list[T]:
        """All of these in `make torture`; in `make test` so many of them, in order, with the first
        and the last.
        """
        if self._deadline is not None or len(items) <= suite:
            return [*items]
        print(f"some of {len(items)}, by seed {self._seed}")
        inner = random.Random(f"{self._seed} {self._name}").sample(
            range(1, len(items) - 1), suite - 2
        )
        return [items[number] for number in (0, *sorted(inner), len(items) - 1)]

    def moments(self, operations: Sequence[str], suite: int) -> list[int]:
        """How many of these operations may be done before something happens: any number of them in
        `make torture`; in `make test` so many numbers, and those next to each new name of a file.
        """
        named = [at for at, name in enumerate(operations) if name in ("exchange", "link", "rename")]
        chosen = {*self.some(range(len(operations) + 2), suite)}
        return sorted(chosen | {each for at in named for each in (at, at + 1, at + 2)})


class Chance:
    """How many examples a property is tried with; set once, before a test module is imported."""

    torture_s: float | None = None

    @classmethod
    def examples(cls, suite: int) -> int:
        """So many in `make test`, more in `make torture`."""
        if cls.torture_s is None:
            return suite
        return suite * max(2, min(_TIMES_MAX, int(cls.torture_s / _EXAMPLES_S)))
