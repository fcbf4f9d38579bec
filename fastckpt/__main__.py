"""`python -m fastckpt`: the command line, which lives in fastckpt.cli. Knows nothing else."""

import sys

from fastckpt.cli import main

sys.exit(main())
