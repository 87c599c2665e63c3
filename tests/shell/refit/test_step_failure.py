"""How a step that fails ends on real actors: who is named and blamed, and that nothing hangs."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from rollsync.pure.refit.blame import HowEnded, StepEnd
from rollsync.pure.refit.steps import UPDATE, Step
from rollsync.shell.refit import step_waiting
from rollsync.shell.refit.engines.errors import PeerFailed, PeerLost, TransferTimeout
from rollsync.shell.refit.errors import EngineStepFailed, WorkerGone, WorkerUnresponsive
from rollsync.shell.refit.step_failure import WorkerAnswers
from tests.shell.actor_processes import kill_actor
from tests.shell.refit.scripted_workers import scripted_sync, scripted_workers

QUICKLY_S = 0.4
STUCK_S = 3.0
"""Longer than anybody waits, so that a test would end otherwise if somebody did."""
Side = list[Any]


@pytest.fixture(scope="module")
def actors(cluster: None) -> tuple[Side, Side]:
    return scripted_workers(1), scripted_workers(2, engines=True)


@pytest.fixture
def sides(actors: tuple[Side, Side]) -> tuple[Side, Side]:
    """A policy worker and two engines."""
    policy, engines = actors
    ray.get([actor.end_all_well.remote() for actor in policy + engines])
    return actors


def timeout(worker: str, waited_for: str) -> TransferTimeout:
    error = TransferTimeout(f"{waited_for} said nothing", worker=worker, stage="received")
    error.waited_for = waited_for
    return error


def end(actor: Any, step: str, answer: object, *, takes_s: float = 0.0) -> None:
    ray.get(actor.end.remote(step, answer, takes_s=takes_s))


def test_a_stuck_policy_worker_is_named_and_blamed_and_not_waited_for(
    sides: tuple[Side, Side],
) -> None:
    policy, engines = sides
    sync = scripted_sync(policy, engines, timeout_s=QUICKLY_S)
    sync.init_communicator()
    end(policy[0], Step.TRANSFER, None, takes_s=STUCK_S)
    for place, engine in enumerate(engines):
        end(engine, UPDATE, timeout(f"rollout {place}", "policy 0"))
    with pytest.raises(WorkerUnresponsive, match="policy worker 0 does not answer") as raised:
        sync.sync_weights()
    assert raised.value.workers == ("policy worker 0",)
    assert any("policy 0 said nothing" in note for note in raised.value.__notes__)
    failure = sync.last_failure
    assert failure is not None
    assert failure.to_blame == failure.silent == {0}
    assert failure.engines_to_blame == frozenset()
    assert all(Step.FINALIZE in ray.get(engine.asked.remote()) for engine in engines)
    sync.shutdown()


def test_a_stuck_engine_is_blamed_and_the_policy_worker_that_waited_for_it_is_not(
    sides: tuple[Side, Side],
) -> None:
    policy, engines = sides
    sync = scripted_sync(policy, engines, timeout_s=QUICKLY_S)
    sync.init_communicator()
    end(policy[0], Step.TRANSFER, timeout("policy 0", "rollout 1"))
    end(engines[0], UPDATE, PeerFailed("it gave up", worker="rollout 0", stage="received"))
    end(engines[1], UPDATE, None, takes_s=STUCK_S)
    with pytest.raises(WorkerUnresponsive, match="engine 1 does not answer"):
        sync.sync_weights()
    assert sync.last_failure is not None
    assert sync.last_failure.engines_to_blame == {1}


def test_an_engine_that_goes_on_after_all_gave_up_is_blamed_by_the_one_that_waited() -> None:
    late = timeout("policy 0", "rollout 3")
    gone = PeerLost("policy 0 is gone", worker="rollout 3", stage="received")
    failure = WorkerAnswers(policy=(late,), engines=(None, gone), ranks_per_engine=2)
    assert failure.engines_to_blame == {1}
    assert failure.cause(gone) is late


@pytest.mark.parametrize(
    ("answer", "blamed"),
    [
        (False, {0}),
        (None, set()),
        (PeerLost("gone", worker="rollout 0", stage="received"), set()),
        (OSError("no memory"), {0}),
        (EngineStepFailed("it failed", end=StepEnd(HowEnded.FAILED)), {0}),
        (EngineStepFailed("it heard", end=StepEnd(HowEnded.HEARD)), set()),
        (EngineStepFailed("late", end=StepEnd(HowEnded.TIMED_OUT, ("policy 0",))), set()),
        (EngineStepFailed("late", end=StepEnd(HowEnded.TIMED_OUT, ("rollout 1",))), {1}),
    ],
)
def test_what_an_engine_answers_says_who_is_to_blame(answer: object, blamed: set[int]) -> None:
    heard = PeerFailed("another one failed", worker="rollout 1", stage="received")
    assert WorkerAnswers((heard,), (answer, heard)).engines_to_blame == blamed


def all_fail(policy: Side, engines: Side) -> None:
    for actor, step in ((policy[0], Step.TRANSFER), (engines[0], UPDATE), (engines[1], UPDATE)):
        end(actor, step, OSError("the link is down"))


def one_fails_first(policy: Side, engines: Side) -> None:
    end(policy[0], Step.TRANSFER, OSError("the link is down"))
    end(engines[0], UPDATE, True, takes_s=QUICKLY_S)


@pytest.mark.parametrize(("failing", "torn_down"), [(all_fail, False), (one_fails_first, True)])
def test_a_sync_is_torn_down_for_its_own_failure_and_not_for_that_of_an_earlier_shutdown(
    sides: tuple[Side, Side],
    monkeypatch: pytest.MonkeyPatch,
    failing: Callable[[Side, Side], None],
    torn_down: bool,
) -> None:
    """Only where a worker still waits for one that failed, that one's half of the set-up is given
    back; then the rest of it has to go too."""
    monkeypatch.setattr(step_waiting, "NOTICED_S", QUICKLY_S / 8)
    policy, engines = sides
    sync = scripted_sync(policy, engines, timeout_s=60.0)
    sync.init_communicator()
    end(engines[0], Step.FINALIZE, OSError("it cannot let go"))
    end(engines[1], Step.FINALIZE, None, takes_s=QUICKLY_S)
    with pytest.raises(OSError, match="it cannot let go"):
        sync.shutdown()
    for engine in engines:
        end(engine, Step.FINALIZE, None)
    sync.sync_weights()
    failing(policy, engines)
    before = ray.get(engines[1].asked.remote()).count(Step.FINALIZE)
    with pytest.raises(OSError, match="the link is down"):
        sync.sync_weights()
    assert ray.get(engines[1].asked.remote()).count(Step.FINALIZE) == before + torn_down
    assert sync._checkpoint_engine_ready == (not torn_down)


@pytest.mark.usefixtures("cluster")
def test_a_killed_engine_is_named_and_a_shutdown_finalizes_those_that_live() -> None:
    (policy,), engines = scripted_workers(1), scripted_workers(2, engines=True)
    sync = scripted_sync([policy], engines, timeout_s=60.0)
    sync.init_communicator()
    kill_actor(engines[1])
    with pytest.raises(WorkerGone, match=r"^engine 1 \(rollout worker 1\) is gone: ") as raised:
        sync.sync_weights()
    assert isinstance(raised.value, RayActorError)
    assert isinstance(raised.value.__cause__, RayActorError)
    assert raised.value.workers == ("engine 1 (rollout worker 1)",)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    failure = sync.last_failure
    sync.shutdown()
    assert sync.last_failure is failure
    for alive in (policy, engines[0]):
        assert ray.get(alive.asked.remote())[-1] == Step.FINALIZE
    with pytest.raises(WorkerGone, match=r"^engine 1 \(rollout worker 1\) is gone"):
        sync.init_communicator()
    left = scripted_sync([policy], engines[:1], timeout_s=60.0)
    left.reconnect()
    end(engines[0], Step.FINALIZE, OSError("it cannot let go"))
    kill_actor(policy)
    with pytest.raises(OSError, match="it cannot let go"):
        left.shutdown()
    with pytest.raises(WorkerGone, match=r"^policy worker 0 is gone"):
        left.init_communicator()
    ray.kill(engines[0])
