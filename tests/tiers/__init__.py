"""Node-local tiers: two commits, and the newest step that is whole."""
