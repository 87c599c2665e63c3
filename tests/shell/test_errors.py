"""Exceptions that cross a Ray call arrive as they were raised."""

from __future__ import annotations

import pickle

import pytest

from rollsync.pure.refit.control import Failed
from rollsync.shell.errors import RollsyncError
from rollsync.shell.refit.engines.errors import PeerFailed, PeerLost, TransferTimeout
from rollsync.shell.refit.errors import EngineOutdated, WeightTransferFailed

ERRORS: list[RollsyncError] = [
    RollsyncError("what", remedy="do"),
    EngineOutdated(serving=1, wanted=2),
    WeightTransferFailed("what", backend="shm"),
    # These are also of a built-in class with a layout of its own.
    PeerLost("what", worker="policy 0", stage="connected", tensor="weight"),
    PeerFailed("what", worker="policy 0", stage="connected"),
    PeerFailed.heard(
        Failed(worker="rollout 1", stage="loaded", tensor="weight", message="what"),
        worker="policy 0",
        stage="connected",
    ),
    TransferTimeout("what", worker="policy 0", stage="connected", remedy="do"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda each: type(each).__name__)
def test_an_error_survives_pickling(error: RollsyncError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
