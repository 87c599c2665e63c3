"""Decisions, as functions of frozen values: `refit`, `rollout`, `snapshot`, and `config`."""
