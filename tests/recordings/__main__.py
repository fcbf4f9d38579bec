"""Writes the recordings anew, or only those whose name contains a word.

    python -m tests.recordings --write [WORD]

Without --write it shows what is otherwise than recorded.
"""

from __future__ import annotations

import argparse
import sys

from tests.crews.group_crew import Nursery
from tests.recordings.golden import RANKS_IMPORT, Golden


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recordings", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("word", nargs="?", default="")
    options = parser.parse_args()
    nursery = Nursery(RANKS_IMPORT)
    try:
        golden = Golden(nursery)
        for name in golden.names():
            if options.word in name and (told := golden.difference(name)):
                sys.stdout.write(told)
                if options.write:
                    golden.write(name)
        if options.write and not options.word:
            golden.remove_others()
    finally:
        nursery.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
