"""A whole refit that is read straight into a torch model: first learned, then direct."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from rollsync.pure.refit.lifecycle import Poisoned, Serving
from rollsync.shell.refit.load_recorder import LoadRecorder
from rollsync.shell.refit.refit_receiver import RefitReceiver
from rollsync.shell.refit.refit_sender import RefitSender
from rollsync.shell.refit.report import WorkerTransfer
from rollsync.shell.refit.torch_update import TorchModelUpdate
from rollsync.shell.refit.weights import checkpoint_weights, declare_weights
from tests.shell.refit.tiny_models import make_model


class CountingUpdate(TorchModelUpdate):
    """Counts what is loaded past the direct way."""

    loaded = 0

    def load(self, batch: object) -> None:
        type(self).loaded += len(batch)  # type: ignore[arg-type]
        super().load(batch)  # type: ignore[arg-type]


class Refit:
    """A policy model and an engine's, in one process, on two threads."""

    def __init__(self, *, tied: bool, declared: bool = True) -> None:
        self.policy, self.engine = make_model(tied=tied), make_model(tied=tied, seed=1)
        CountingUpdate.loaded = 0
        self.sender = RefitSender(rank=0)
        self.receiver = RefitReceiver(
            local_rank=0, engine_world_size=1, update=self._update, model=lambda: self.engine
        )
        for end in (self.sender, self.receiver):
            end.init("shm", 65536, {"direct": True, "refit_timeout_s": 20.0})
        metadata = [self.sender.prepare(), self.receiver.prepare()]
        if declared:
            specs = tuple(declare_weights(self.policy).values())
            self.sender.declare(specs)
            self.receiver.declare(specs)
        self.sender.init_process_group(metadata=metadata, train_world_size=1, rollout_world_size=1)
        self.receiver.init_process_group(0, 1, 1, metadata)
        self.version = 0

    def _update(self, recorder: LoadRecorder | None) -> CountingUpdate:
        return CountingUpdate(self.engine, recorder)

    @torch.no_grad()
    def sync(self, weights: Iterator[tuple[str, torch.Tensor]] | None = None) -> WorkerTransfer:
        """One sync of moved weights."""
        self.version += 1
        for parameter in self.policy.parameters():
            parameter.add_(torch.randn_like(parameter))
        errors: list[Exception] = []

        def send() -> None:
            try:
                self.sender.send(
                    weights or checkpoint_weights(self.policy), weight_version=lambda: self.version
                )
            except Exception as error:
                errors.append(error)

        CountingUpdate.loaded = 0
        sending = threading.Thread(target=send)
        sending.start()
        try:
            answer = self.receiver.update()
        finally:
            sending.join()
        assert not errors
        return answer

    def is_same(self) -> bool:
        pairs = zip(self.policy.parameters(), self.engine.parameters(), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)

    def close(self) -> None:
        self.sender.finalize()
        self.receiver.finalize()


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_sync_is_learned_from_and_the_next_ones_load_nothing(tied: bool) -> None:
    refit = Refit(tied=tied)
    first = refit.sync()
    assert CountingUpdate.loaded > 0
    assert refit.is_same()
    for _ in range(2):
        transfer = refit.sync()
        assert CountingUpdate.loaded == 0
        assert refit.is_same()
        assert (transfer.tensors, transfer.payload_bytes) == (first.tensors, first.payload_bytes)
    assert refit.receiver.state == Serving(3)
    refit.close()


def test_a_parameter_that_moved_is_noticed_and_learned_anew() -> None:
    refit = Refit(tied=False)
    refit.sync()
    refit.sync()
    weight = refit.engine.get_parameter("model.norm.weight")
    weight.data = weight.data.clone()
    for loads in (True, False):
        refit.sync()
        assert (CountingUpdate.loaded > 0) == loads
        assert refit.is_same()
    refit.close()


def test_weights_that_are_tied_and_undeclared_are_loaded() -> None:
    refit = Refit(tied=True, declared=False)

    def both_names() -> Iterator[tuple[str, torch.Tensor]]:
        yield "lm_head.weight", refit.policy.lm_head.weight.detach()
        yield from checkpoint_weights(refit.policy)

    for _ in range(3):
        refit.sync(both_names())
        assert refit.is_same()
    refit.close()


def test_a_weight_that_is_new_poisons_and_the_next_sync_learns_anew() -> None:
    refit = Refit(tied=False, declared=False)
    refit.sync()

    def more() -> Iterator[tuple[str, torch.Tensor]]:
        yield from checkpoint_weights(refit.policy)
        yield "model.more", torch.ones(3)

    with pytest.raises(Exception, match=r"model\.more"):
        refit.sync(more())
    assert isinstance(refit.receiver.state, Poisoned)
    for loads in (True, False):
        refit.sync()
        assert (CountingUpdate.loaded > 0) == loads
        assert refit.is_same()
    refit.close()


def test_a_weight_that_does_not_come_is_missed() -> None:
    refit = Refit(tied=False, declared=False)
    refit.sync()
    with pytest.raises(Exception, match=r"without weights for 'lm_head\.weight'"):
        refit.sync(iter(list(checkpoint_weights(refit.policy))[:-1]))
    assert isinstance(refit.receiver.state, Poisoned)
    refit.close()
