"""The terms on which ranks take part in something, for ranks whose terms differ: these share no
other key of the store, and would wait for each other in vain.

Responsible for telling other ranks of this one's terms, and for saying in which ones another rank
differs. It must not know what the terms mean, nor what is agreed on.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from typing import Any, TypeAlias

from fastckpt.ranks.round_numbers import RoundNumbers

Terms: TypeAlias = Mapping[str, str]

_ABSENT = b"absent"  # makes compare_set a get that does not wait
_TOLD_MAX = 256  # of a process that has more, nothing is told


class KnownTerms:
    """The terms of this process for one purpose in one group, each with its session, and what other
    ranks have told of theirs.

    Args:
        prefix: the beginning of the keys that tell of terms; the same on every rank.

    Attributes:
        pid: the number of the process.
    """

    def __init__(self, prefix: str) -> None:
        self.pid = os.getpid()
        self._begin, self._prefix = prefix, ""
        self._lock = threading.Lock()
        self._sessions: dict[str, RoundNumbers] = {}
        self._used = list[Terms]()  # those that were told; under _lock

    def session(self, terms: Terms) -> RoundNumbers:
        """Returns the session on these terms, on which this process is ready to take part now."""
        return self._sessions.setdefault(json.dumps(terms), RoundNumbers())

    def _made(self) -> list[Terms]:
        return [json.loads(text) for text in self._sessions.copy()]

    def tell(self, client: Any, rank: int, terms: Terms, why: str) -> None:
        """Tells the others that this rank takes part on these terms; or `why` it does not."""
        with self._lock:
            if not self._prefix:  # each life of a job has its own, on a store that outlives it
                number = client.add(f"{self._begin}/opened/{rank}", 1)
                client.delete_key(f"{self._begin}/{number - 1}/{rank}")
                self._prefix = f"{self._begin}/{number}"
            made = self._made()
            if len(made) > _TOLD_MAX:
                client.delete_key(f"{self._prefix}/{rank}")
                return
            self._used = [*(each for each in self._used if each != terms), terms]
            client.set(f"{self._prefix}/{rank}", json.dumps([made, self._used, why]).encode())

    def differing(self, client: Any, rank: int, own: Terms, own_rank: int) -> str:
        """Returns why another rank does not take part on these terms of this one, in words; "" if
        it may, as far as is known.
        """
        told = client.compare_set(f"{self._prefix}/{rank}", _ABSENT, _ABSENT)
        if told == _ABSENT:
            return ""
        made, used, why = json.loads(told)
        mine = self._made()
        others = [terms for terms in used if terms not in mine]
        if own in made or not (why or others):
            return ""
        if why:
            return str(why)
        # Of equally near ones, those that were told last.
        nearest = max(others[::-1], key=lambda its: sum(its.get(name) == own[name] for name in own))
        names = [name for name in own if nearest.get(name) != own[name]]
        its, ours = (", ".join(f"{n}={of.get(n)}" for n in names) for of in (nearest, own))
        return f"has {its}, where rank {own_rank} has {ours},"
