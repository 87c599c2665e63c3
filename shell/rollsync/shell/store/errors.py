"""What the store raises when it refuses, beside plain `OSError`s. The value says why."""

from __future__ import annotations

from rollsync.pure.snapshot.errors import StoreRefusal, describe_refusal, remedy_for
from rollsync.shell.errors import RollsyncError


class StoreError(RollsyncError):
    """A run directory that this run may not use, or cannot."""

    def __init__(self, value: StoreRefusal) -> None:
        super().__init__(describe_refusal(value), remedy=remedy_for(value))
        self.value = value
