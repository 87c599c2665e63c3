"""Kinds of what a run has in flight: its state, differences of it, and the parts of a save."""
