"""Frameworks: what stock readers open, and nothing lost by a kill."""
