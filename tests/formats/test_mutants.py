"""What `make asan-extension` gives to the sanitizers: seeds of every format are there, and mutants
are read, or refused by our errors, here without sanitizers.
"""

from __future__ import annotations

from pathlib import Path

from tests.torture import mutants

MUTANTS = 300


def test_mutants_are_refused_or_read(tmp_path: Path) -> None:
    ends = mutants.run(MUTANTS, 20261126, tmp_path)
    of_mutants = {end: times for end, times in ends.items() if ": seed: " not in end}
    assert sum(of_mutants.values()) == MUTANTS
    assert sum(times for end, times in of_mutants.items() if "Corrupt" in end) > MUTANTS / 2
