"""What the nursery of ranks imports before it forks those that play scenes.

Responsible for their quick start. It starts no thread, which a fork would leave behind.
"""

from __future__ import annotations

import tests.crews.dcp_imports
import tests.crews.steps_imports
import tests.recordings.scenes

__all__ = ["tests"]
