"""Where the project's own files lie, for tests that read or run them."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
