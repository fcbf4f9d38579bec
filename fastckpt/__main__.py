"""`python -m fastckpt`: runs the command line of fastckpt.cli."""

import sys

from fastckpt.cli import main

sys.exit(main())
