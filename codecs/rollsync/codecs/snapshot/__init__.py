"""Kinds of a run directory: a bundle's `manifest`, and the `anchor` that says whose it is."""
