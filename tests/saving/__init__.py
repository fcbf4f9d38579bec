"""Saves in flight: handles, fences, pace, exits, forks and interrupts."""
