"""A fleet of generation engines as a pure state machine: `state`, `events`, `transitions` (the
table, and `apply_to_fleet`) and `decisions` (what follows)."""
