"""A worker that is halted, in whichever step, is waited for no longer than the step may take."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rollsync.pure.refit.patience import WAITS_OF_A_STREAM
from rollsync.pure.refit.steps import UPDATE, Step
from rollsync.shell.refit.errors import WorkerUnresponsive
from tests.shell.refit.scripted_workers import scripted_sync, scripted_workers

SOON_S = 0.9
LONG_S = 3_600.0


class Halting:
    """A policy worker and an engine that are halted in a step, and go on afterwards."""

    def __init__(self) -> None:
        (self.policy,) = scripted_workers(1)
        (self.engine,) = scripted_workers(1, engines=True)
        self._halted: list[int] = []

    def halt(self, worker: Any, step: str) -> None:
        self._halted.append(ray.get(worker.halt_at.remote(step)))

    def wake(self) -> None:
        while self._halted:
            os.kill(self._halted.pop(), signal.SIGCONT)

    def sync(self, *, timeout_s: float = LONG_S, step_timeout_s: float = LONG_S) -> Any:
        return scripted_sync(
            [self.policy], [self.engine], timeout_s=timeout_s, step_timeout_s=step_timeout_s
        )


@pytest.fixture(scope="module")
def actors(cluster: None) -> Halting:
    return Halting()


@pytest.fixture
def halting(actors: Halting) -> Iterator[Halting]:
    ray.get([each.end_all_well.remote() for each in (actors.policy, actors.engine)])
    yield actors
    actors.wake()


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (Step.MEASURE, "policy"),
        (Step.MAKE, "engine"),
        (Step.PREPARE, "policy"),
        (Step.CONNECT, "engine"),
        ("prepare_refit_info", "policy"),
        ("prepare_refit_info", "engine"),
    ],
)
def test_a_worker_halted_in_the_set_up_is_named_with_the_step_and_the_next_set_up_works(
    halting: Halting, step: str, name: str
) -> None:
    worker, called = {
        "policy": (halting.policy, "policy worker 0"),
        "engine": (halting.engine, "engine 0"),
    }[name]
    halting.halt(worker, str(step))
    sync = halting.sync(step_timeout_s=SOON_S)
    with pytest.raises(WorkerUnresponsive, match=f"not ended {step} within {SOON_S} s") as raised:
        sync.init_communicator()
    assert [each.partition(" (")[0] for each in raised.value.workers] == [called]
    assert "raise step_timeout_s (in a run, cluster.coll" in raised.value.remedy
    assert sync.is_stale
    halting.wake()
    sync = halting.sync()
    sync.init_communicator()
    sync.sync_weights()
    sync.shutdown()


def test_both_sides_halted_in_a_transfer_are_named(halting: Halting) -> None:
    timeout_s = SOON_S / WAITS_OF_A_STREAM
    sync = halting.sync(timeout_s=timeout_s)
    halting.halt(halting.policy, Step.TRANSFER)
    halting.halt(halting.engine, UPDATE)
    with pytest.raises(
        WorkerUnresponsive, match=r"processes are .*raise refit_timeout_s"
    ) as raised:
        sync.sync_weights()
    assert raised.value.workers == ("policy worker 0", "engine 0")
    assert f"not ended {Step.TRANSFER} within {SOON_S:g} s" in raised.value.how
    assert sync.last_failure is not None
    assert sync.last_failure.to_blame == sync.last_failure.silent == {0, 1}


def test_a_worker_that_does_not_end_when_the_other_side_has_is_named(halting: Halting) -> None:
    """Nobody waits for it in a stream any more."""
    sync = halting.sync(step_timeout_s=SOON_S)
    halting.halt(halting.policy, Step.TRANSFER)
    how = f"not ended {Step.TRANSFER} within {SOON_S} s after all workers of the other side had"
    with pytest.raises(WorkerUnresponsive, match=how) as raised:
        sync.sync_weights()
    assert raised.value.workers == ("policy worker 0",)
    halting.wake()
    sync.step_timeout_s = LONG_S
    sync.sync_weights()
    assert not sync.is_stale


def test_a_shutdown_waits_no_longer_for_a_worker_that_is_halted(halting: Halting) -> None:
    sync = halting.sync(step_timeout_s=SOON_S)
    sync.init_communicator()
    halting.halt(halting.engine, Step.FINALIZE)
    with pytest.raises(WorkerUnresponsive, match=f"engine 0 .*{Step.FINALIZE} within {SOON_S} s"):
        sync.shutdown()
    assert Step.FINALIZE in ray.get(halting.policy.asked.remote())
    halting.wake()
    sync.shutdown()
