"""Seeds of every format are there, and mutants of them are read, or refused by our errors."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.kit.storm import Storm
from tests.torture import mutants

MUTANTS = 300


def test_mutants_are_refused_or_read(tmp_path: Path, storm: Storm) -> None:
    for rng in storm.rounds(suite=1, torture=30):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        ends = mutants.run(MUTANTS, rng.randrange(1 << 31), folder)
        of_mutants = {end: times for end, times in ends.items() if ": seed: " not in end}
        assert sum(of_mutants.values()) == MUTANTS
        assert sum(times for end, times in of_mutants.items() if "Corrupt" in end) > MUTANTS / 3
