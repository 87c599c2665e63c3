"""A rollout rank's end: what its model is told in which order, and what its state says then."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.lifecycle import Connected, Poisoned, Serving, Unconnected
from rollsync.shell.refit.engines import Batch
from rollsync.shell.refit.errors import RefitConfigurationError, RefitError, WeightMismatch
from rollsync.shell.refit.refit_receiver import RefitReceiver
from rollsync.shell.refit.refit_sender import RefitSender
from rollsync.shell.refit.weights import WEIGHT_VERSION_NAME
from tests.shell.refit.scripted_engine import SCRIPTED, ScriptedEngine

ONE = torch.ones(2)
WHOLE: list[Batch | Exception] = [[("a", ONE)], [("b", ONE), ("c", torch.ones(2))]]


def versioned(version: int, script: Sequence[Batch | Exception]) -> list[Batch | Exception]:
    return [[(WEIGHT_VERSION_NAME, torch.tensor(version))], *script]


@dataclass
class RecordedUpdate:
    """A model's update that writes down what it is told, and fails where it is asked to."""

    told: list[str] = field(default_factory=list)
    fails_at: str = ""

    def leave_out(self, layers: frozenset[str]) -> None:
        self._tell("leave out " + "".join(sorted(layers)))

    def start(self) -> None:
        self._tell("start")

    def load(self, batch: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._tell("load " + "".join(name for name, _ in batch))

    def finish(self) -> None:
        self._tell("finish")

    def abort(self) -> None:
        self._tell("abort")

    def _tell(self, what: str) -> None:
        self.told.append(what)
        if self.fails_at and what.startswith(self.fails_at):
            raise OSError(f"cannot {what}")


@pytest.fixture(autouse=True)
def _no_engine_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedEngine, "made", [])
    monkeypatch.setattr(ScriptedEngine, "script", ())


def test_an_engine_that_relies_on_experts_being_chosen_for_it_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ScriptedEngine, "shard_expert_weights", True)
    sender = RefitSender(rank=0)
    sender.init(SCRIPTED, 1024, {})
    receiver = RefitReceiver(
        local_rank=0, engine_world_size=1, make_update=lambda recorder: RecordedUpdate()
    )
    receiver.init(SCRIPTED, 1024, {})
    for prepare in (sender.prepare, receiver.prepare):
        with pytest.raises(RefitConfigurationError, match="ScriptedEngine sets shard_expert_"):
            prepare()


def connected(update: RecordedUpdate, *, local_rank: int = 0, ranks: int = 1) -> RefitReceiver:
    receiver = RefitReceiver(
        local_rank=local_rank, engine_world_size=ranks, make_update=lambda _: update
    )
    receiver.init(SCRIPTED, 1024, {"option": 1})
    receiver.prepare()
    receiver.init_process_group(0, 1, ranks, [])
    return receiver


def test_an_update_is_started_fed_and_finished_once() -> None:
    update = RecordedUpdate()
    receiver = connected(update)
    states = [receiver.state]
    ScriptedEngine.script = versioned(0, WHOLE)
    transfer = receiver.update()
    states.append(receiver.state)
    assert update.told == ["start", "load ", "load a", "load bc", "finish"]
    assert states == [Connected(), Serving(0)]
    assert (transfer.role, transfer.rank, transfer.weight_version) == ("rollout", 0, 0)
    assert (transfer.tensors, transfer.payload_bytes, transfer.batches) == (3, 24, 3)
    assert set(transfer.stage_s) == {"receive", "load", "finish"}


def test_a_policy_that_names_no_version_is_counted() -> None:
    receiver = connected(RecordedUpdate())
    ScriptedEngine.script = WHOLE
    assert [receiver.update().weight_version for _ in range(3)] == [0, 1, 2]


def test_tied_weights_are_loaded_under_every_name_but_counted_once() -> None:
    update = RecordedUpdate()
    receiver = connected(update)
    receiver.declare([TensorSpec("a", (2,), "float32", ("z",))])
    ScriptedEngine.script = versioned(1, [[("a", ONE)]])
    assert receiver.update().tensors == 1
    assert "load az" in update.told


@pytest.mark.parametrize("fails_at", ["start", "load b", "finish"])
def test_a_model_that_fails_poisons_the_rank_and_closes_the_update(fails_at: str) -> None:
    update = RecordedUpdate(fails_at=fails_at)
    receiver = connected(update)
    ScriptedEngine.script = versioned(4, WHOLE)
    with pytest.raises(OSError, match="cannot"):
        receiver.update()
    assert update.told[-1] == "abort"
    states = [receiver.state]
    cause = f"OSError: cannot {update.told[-2]}"
    (engine,) = ScriptedEngine.made
    assert ("stopped early" in engine.calls) == (fails_at != "finish")
    update.fails_at = ""
    ScriptedEngine.script = versioned(5, WHOLE)
    receiver.update()
    states.append(receiver.state)
    assert states == [Poisoned(4, cause), Serving(5)]


@pytest.mark.parametrize("arrived", [0, 1, 2, 3])
def test_a_stream_that_breaks_anywhere_poisons_the_rank(arrived: int) -> None:
    update = RecordedUpdate()
    receiver = connected(update)
    ScriptedEngine.script = versioned(1, WHOLE)
    receiver.update()
    update.told.clear()
    ScriptedEngine.script = [*versioned(7, WHOLE)[:arrived], ConnectionError("gone")]
    with pytest.raises(ConnectionError, match="gone"):
        receiver.update()
    assert receiver.state == Poisoned(7 if arrived else 2, "ConnectionError: gone")
    assert update.told[0] == ("start" if arrived else "abort")
    assert update.told[-1] == "abort"
    assert "finish" not in update.told


def test_an_empty_stream_is_no_update() -> None:
    receiver = connected(RecordedUpdate())
    with pytest.raises(RefitError, match="empty"):
        receiver.update()
    assert isinstance(receiver.state, Poisoned)


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        (TensorSpec("a", (2,), "bfloat16"), "'a'"),
        (TensorSpec("missing", (2,), "float32"), "missing"),
    ],
)
def test_a_stream_that_is_not_the_declared_one_poisons(declared: TensorSpec, named: str) -> None:
    update = RecordedUpdate()
    receiver = connected(update)
    receiver.declare([declared])
    ScriptedEngine.script = versioned(1, WHOLE)
    with pytest.raises(WeightMismatch, match=named):
        receiver.update()
    assert "finish" not in update.told
    assert isinstance(receiver.state, Poisoned)


def test_nothing_is_received_before_the_rank_is_connected() -> None:
    receiver = RefitReceiver(
        local_rank=0, engine_world_size=1, make_update=lambda _: RecordedUpdate()
    )
    for step in (receiver.prepare, receiver.update):
        with pytest.raises(RefitConfigurationError, match="init_checkpoint_engine"):
            step()
    receiver.finalize()
    receiver.init(SCRIPTED, 1024, {})
    receiver.prepare()
    with pytest.raises(RefitConfigurationError):
        receiver.update()
    assert receiver.state == Unconnected()


@pytest.mark.parametrize(
    ("local_rank", "ranks", "prefix", "world", "global_rank"),
    [(0, 2, 0, 4, 0), (0, 2, 2, 4, 2), (1, 2, 2, 4, 3), (3, 4, 2, 4, 3), (0, 1, 0, 1, 0)],
)
def test_the_rank_among_all_rollout_workers(
    local_rank: int, ranks: int, prefix: int, world: int, global_rank: int
) -> None:
    receiver = RefitReceiver(
        local_rank=local_rank, engine_world_size=ranks, make_update=lambda _: RecordedUpdate()
    )
    receiver.init(SCRIPTED, 1024, {})
    assert receiver.prepare() == {
        "endpoint": "here",
        "rank": local_rank,
        "takes_weight_version": True,
    }
    receiver.init_process_group(prefix, 1, world, ["metadata"])
    (engine,) = ScriptedEngine.made
    assert engine.calls[-1] == {
        "rollout_rank": global_rank,
        "train_world_size": 1,
        "rollout_world_size": world,
        "metadata": ["metadata"],
    }


def test_the_engine_stays_with_its_options_and_goes_with_others() -> None:
    receiver = connected(RecordedUpdate())
    ScriptedEngine.script = versioned(1, WHOLE)
    receiver.update()
    receiver.finalize()
    assert receiver.state == Serving(1, connected=False)
    receiver.init(SCRIPTED, 1024, {"option": 1})
    assert len(ScriptedEngine.made) == 1
    receiver.init(SCRIPTED, 1024, {"option": 2})
    first, second = ScriptedEngine.made
    assert first.calls[-1] == "finalize"
    assert second.options == (1024, {"option": 2})


@pytest.mark.parametrize(
    ("rollout", "names_version"),
    [
        ([{"takes_weight_version": True}, {"takes_weight_version": True}], True),
        ([{"takes_weight_version": True}, {"rank": 0}], False),
        (["which cannot", "be marked"], True),
    ],
)
def test_the_version_is_named_to_those_only_who_do_not_take_it_for_a_weight(
    rollout: list[object], names_version: bool
) -> None:
    sender = RefitSender(rank=0)
    sender.init(SCRIPTED, 1024, {})
    sender.init_process_group(
        metadata=[{"rank": 0}, *rollout], train_world_size=1, rollout_world_size=2
    )
    transfer = sender.send(iter([("a", ONE)]), weight_version=lambda: 7)
    (engine,) = ScriptedEngine.made
    assert [name for name, _ in engine.sent] == [WEIGHT_VERSION_NAME] * names_version + ["a"]
    assert (transfer.weight_version, transfer.tensors) == (7, 1)


def test_a_sender_puts_the_version_in_front_and_counts_what_follows() -> None:
    sender = RefitSender(rank=0)
    with pytest.raises(RefitConfigurationError, match="init_checkpoint_engine"):
        sender.send([], weight_version=lambda: 0)
    sender.init(SCRIPTED, 1024, {})
    assert sender.prepare() == {"endpoint": "here", "rank": 0}
    sender.init_process_group(metadata=["m"], train_world_size=1, rollout_world_size=2)
    transfer = sender.send(iter([("a", ONE), ("b", ONE)]), weight_version=lambda: 0)
    (engine,) = ScriptedEngine.made
    assert [name for name, _ in engine.sent] == [WEIGHT_VERSION_NAME, "a", "b"]
    assert engine.sent[0][1].item() == 0
    assert engine.calls[-1] == {
        "worker_rank": 0,
        "metadata": ["m"],
        "train_world_size": 1,
        "rollout_world_size": 2,
    }
    assert (transfer.role, transfer.rank, transfer.weight_version) == ("policy", 0, 0)
    assert (transfer.tensors, transfer.payload_bytes) == (2, 16)
