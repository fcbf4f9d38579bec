"""What the nursery of ranks imports before it forks them; see steps_imports.py.

Responsible for their quick start. It starts no thread, which a fork would leave behind.
"""

from __future__ import annotations

import tests.crews.memory_bodies
import tests.crews.steps_imports

__all__ = ["tests"]
