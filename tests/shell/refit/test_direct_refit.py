"""A whole refit that is read straight into a torch model: first learned, then direct, and what is
not read so comes in the parts that a rank keeps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rollsync.pure.refit import TensorSpec
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
            local_rank=0, engine_world_size=1, make_update=self._update, model=lambda: self.engine
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
        assert (first.direct_bytes, transfer.direct_bytes) == (0, first.payload_bytes)
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


SHARED = (
    TensorSpec("rows", (4, 6), "float32"),
    TensorSpec("columns", (4, 6), "float32"),
    TensorSpec("first", (4, 6), "float32"),
    TensorSpec("second", (4, 6), "float32"),
)


class Half(torch.nn.Module):
    """What one of two ranks keeps: some rows as they come, half of the columns in another type, and
    one of two tensors, which the second rank converts."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        own = (
            ("rows", torch.zeros(2, 6)),
            ("columns", torch.zeros(4, 3).half()),
            (("first", "second")[rank], torch.zeros(4, 6, dtype=torch.float64 if rank else None)),
        )
        for name, tensor in own:
            self.add_module(name, torch.nn.Module())
            self.get_submodule(name).weight = torch.nn.Parameter(tensor)

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor that the rank keeps."""
        if name == "rows":
            return tensor[2 * self.rank :][:2]
        return tensor[:, 3 * self.rank :][:, :3] if name == "columns" else tensor


class HalfUpdate:
    """Loads what the rank keeps; notes what it was given."""

    def __init__(self, model: Half, recorder: LoadRecorder | None, *, fails: bool) -> None:
        self.model, self.recorder, self.fails = model, recorder, fails
        self.given: list[str] = []
        self.left_out: frozenset[str] = frozenset()

    def leave_out(self, layers: frozenset[str]) -> None:
        self.left_out = layers

    def start(self) -> None: ...

    @torch.no_grad()
    def load(self, batch: Sequence[tuple[str, torch.Tensor]]) -> None:
        watching = (
            contextlib.nullcontext() if self.recorder is None else self.recorder.loading(batch)
        )
        with watching:
            for name, tensor in batch:
                self.given.append(name)
                if name in dict(self.model.named_children()):
                    weight = self.model.get_parameter(f"{name}.weight")
                    weight.copy_(self.model.of(name, tensor))

    def finish(self) -> None:
        if self.fails:
            raise ArithmeticError("it does not finish")

    def abort(self) -> None: ...


class SharedRefit:
    """A policy's tensors, and two ranks of an engine that share its model, on three threads."""

    def __init__(self) -> None:
        self.failing: int | None = None
        """A rank whose loader does not finish."""
        self.sender = RefitSender(rank=0)
        self.models = [Half(rank) for rank in range(2)]
        self.updates: dict[int, HalfUpdate] = {}
        self.receivers = [self._receiver(model) for model in self.models]
        self.ends: list[RefitSender | RefitReceiver] = [self.sender, *self.receivers]
        for end in self.ends:
            end.init("shm", 65536, {"direct": True, "refit_timeout_s": 20.0})
        metadata = [end.prepare() for end in self.ends]
        for end in self.ends:
            end.declare(SHARED)
        self.sender.init_process_group(metadata=metadata, train_world_size=1, rollout_world_size=2)
        for receiver in self.receivers:
            receiver.init_process_group(0, 1, 2, metadata)

    def _receiver(self, model: Half) -> RefitReceiver:
        def update(recorder: LoadRecorder | None) -> HalfUpdate:
            fails = model.rank == self.failing
            self.updates[model.rank] = HalfUpdate(model, recorder, fails=fails)
            return self.updates[model.rank]

        return RefitReceiver(
            local_rank=model.rank, engine_world_size=2, make_update=update, model=lambda: model
        )

    def sync(self, *, unreadable: str = "") -> list[tuple[list[str], int]]:
        """One sync of other weights: what each rank's loader was given, and the bytes it received.

        Args:
            unreadable: a tensor whose memory cannot be read directly.
        """
        weights = {spec.name: torch.randn(spec.shape) for spec in SHARED}
        if unreadable:
            weights[unreadable] = torch.randn(4, 12)[:, ::2]
        with ThreadPoolExecutor(3) as threads:
            sent = threads.submit(self.sender.send, iter(weights.items()), weight_version=lambda: 1)
            taken = [threads.submit(receiver.update) for receiver in self.receivers]
            sent.result()
            transfers = [each.result() for each in taken]
        for model in self.models:
            for name, parameter in model.named_parameters():
                first_name = name.removesuffix(".weight")
                expected = model.of(first_name, weights[first_name]).to(parameter.dtype)
                assert torch.equal(parameter, expected), (model.rank, name)
        return [
            (self.updates[rank].given, transfer.payload_bytes)
            for rank, transfer in enumerate(transfers)
        ]

    def is_watched(self) -> bool:
        return any(update.recorder is not None for update in self.updates.values())

    def close(self) -> None:
        for end in self.ends:
            end.finalize()


def test_ranks_that_share_a_model_read_what_they_can_and_are_sent_their_parts_of_the_rest() -> None:
    refit = SharedRefit()
    size = SHARED[0].tensor_bytes
    names = [spec.name for spec in SHARED]
    assert refit.sync() == [(names, 4 * size), (names, 4 * size)]
    # Nobody reads the second tensor directly, which the first rank has no use for.
    rest = [(["columns"], 2 * size), (["columns", "second"], 2 * size)]
    for _ in range(2):
        assert refit.sync() == rest
        assert refit.is_watched()
    # What was read directly until now has parts too, whose first load is watched.
    for is_watched in (True, False):
        assert refit.sync(unreadable="rows") == [
            (["rows", *given], received) for given, received in rest
        ]
        assert refit.is_watched() == is_watched
    refit.close()


def test_a_rank_that_failed_alone_learns_anew_beside_one_that_reads_directly() -> None:
    refit = SharedRefit()
    _, usual, _ = (refit.sync() for _ in range(3))
    refit.failing = 1
    with pytest.raises(ArithmeticError, match="does not finish"):
        refit.sync()
    assert isinstance(refit.receivers[0].state, Serving)
    assert isinstance(refit.receivers[1].state, Poisoned)
    refit.failing = None
    names = [spec.name for spec in SHARED]
    size = SHARED[0].tensor_bytes
    # Nothing is read directly that one of them takes through buckets.
    assert refit.sync() == [(names[:-1], 2 * size), (names, 4 * size)]
    assert refit.sync() == usual
    refit.close()
