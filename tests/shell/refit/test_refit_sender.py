"""A policy rank's end of a refit: what is left of a stream whose iterator fails."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from rollsync.shell.refit.engines.conformance_workers import IteratorFailed
from rollsync.shell.refit.refit_sender import RefitSender
from tests.shell.refit.engines.footprint import without_collector


class Gathered:
    """What a trainer's iterator has gathered."""


def failing(gathered: Gathered) -> Iterator[tuple[str, torch.Tensor]]:
    """One weight, and an error."""
    yield "weight", torch.zeros(3)
    raise IteratorFailed(f"no more of {gathered}")


@pytest.mark.parametrize("knows_receivers", [False, True])
def test_a_failed_send_keeps_nothing_of_the_iterator_without_the_collector(
    knows_receivers: bool,
) -> None:
    sender = RefitSender(rank=0)
    sender.init("shm", 4096, {})
    receiving: Future[None] | None = Future() if knows_receivers else None
    gathered = Gathered()
    kept = weakref.ref(gathered)
    weights = failing(gathered)
    del gathered
    with without_collector():
        with pytest.raises(IteratorFailed, match="no more of") as raised:
            sender.send(weights, weight_version=lambda: 1, receiving=receiving)
        assert kept() is not None
        del weights, raised
        assert kept() is None
