"""Syncs of a fleet: what each outcome means for each engine, and what is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace
from ray.exceptions import ActorDiedError

from rollsync.pure.refit.fleet.decisions import may_serve
from rollsync.pure.refit.fleet.events import ActorDied, ProbeMissed
from rollsync.pure.refit.fleet.state import EnginePhase
from rollsync.pure.refit.lifecycle import Poisoned, Serving
from rollsync.shell.refit import CheckpointEngineWeightSynchronizer
from rollsync.shell.refit.engines.errors import PeerFailed, PeerLost, TransferTimeout
from rollsync.shell.refit.errors import RefitError, WorkerUnresponsive
from rollsync.shell.refit.interfaces import Timer
from rollsync.shell.refit.report import SyncReport
from rollsync.shell.refit.step_failure import WorkerAnswers
from rollsync.shell.refit.worker_group import GenerationGroup
from rollsync.shell.rollout.clients import EnginesLost, TrainerLost
from rollsync.shell.run.fleet_sync import ALL_DIED, FleetSync
from tests.shell.run.scripted_engines import QUICK, ScriptedEngine, ScriptedFleet, running_fleet

pytestmark = pytest.mark.asyncio
VERSION = 4
PATIENT = replace(QUICK, probe_interval_s=3600.0)
"""Nobody is probed but by a sync that failed."""
Attempt = Callable[["Scripted", list[ScriptedEngine]], None]
"""What happens in an attempt, to the engines that take part. It runs in a thread, and raises as the
attempt is to fail."""


class Scripted(CheckpointEngineWeightSynchronizer):
    """Moves no weights. Its attempts end as they are told to, and at last they all succeed."""

    def __init__(self, run: ScriptedFleet, group: GenerationGroup, attempts: list[Attempt]) -> None:
        self.run, self.group, self.attempts = run, group, attempts
        self.loop = asyncio.get_running_loop()
        self.last_failure = None
        self.calls: list[str] = []
        self.version = VERSION

    def init_communicator(self) -> None:
        self.calls.append("connect")

    def reconnect(self) -> None:
        self.calls.append("reconnect")

    def shutdown(self) -> None:
        self.calls.append("shut down")

    def sync_weights(
        self, *, timer: Timer | None = None, kv_scales: dict[str, float] | None = None
    ) -> SyncReport:
        leaders = self.group.worker_group.leaders
        engines = [each for each in self.run.made if each in leaders]
        self.calls.append(f"sync {[self.run.made.index(each) for each in engines]}")
        self.last_failure = None
        attempt = self.attempts.pop(0) if self.attempts else all_load
        attempt(self, engines)
        return SyncReport(
            backend="scripted",
            weight_versions=(self.version,),
            tensors=1,
            payload_bytes=100 * len(engines),
            received_bytes=(100,) * len(engines),
            direct_bytes=(0,) * len(engines),
            batches=1,
            buckets=1,
            bucket_bytes=100,
            rollout_workers=len(engines),
            choices=(),
            total_s=0.0,
            stage_s={},
        )

    def note_death(self, engine: ScriptedEngine) -> None:
        """The engine's process ends, and the fleet notes it before the attempt goes on."""
        engine.died = True
        name = f"engine-{self.run.made.index(engine)}"

        async def note() -> None:
            self.run.fleet.apply(ActorDied(name, "killed"))

        asyncio.run_coroutine_threadsafe(note(), self.loop).result()

    def fail(
        self, error: Exception, *answers: object, policy: tuple[object, ...] = (None,)
    ) -> None:
        """Fail, with what each engine answered, and each policy worker."""
        self.last_failure = WorkerAnswers(policy=policy, engines=answers)
        raise error


class Trainer:
    """The trainer's version, and nothing else."""

    trainer_version = VERSION


class Run:
    """A fleet, its sync, and what was told of retries."""

    def __init__(self, fleet: ScriptedFleet, attempts: list[Attempt]) -> None:
        self.scripted = fleet
        group = GenerationGroup([])
        self.synchronizer = Scripted(fleet, group, attempts)
        self.retries: list[tuple[int, str]] = []
        self.sync = FleetSync(
            fleet.fleet,
            group=group,
            synchronizer=self.synchronizer,
            trainer=Trainer(),
            retried=lambda version, why: self.retries.append((version, why)),
        )

    @property
    def serving(self) -> list[int]:
        """Who serves the version of the sync."""
        names = may_serve(self.scripted.fleet.state, VERSION)
        return [int(name.removeprefix("engine-")) for name in names]


@asynccontextmanager
async def fleet_of(count: int, *attempts: Attempt, min_healthy: int = 1) -> AsyncIterator[Run]:
    settings = replace(PATIENT, min_healthy=min_healthy)
    async with running_fleet(count, settings) as scripted:
        yield Run(scripted, list(attempts))


def all_load(world: Scripted, engines: list[ScriptedEngine]) -> None:
    for engine in engines:
        engine.state = Serving(world.version)


def timeout(worker: str, waited_for: str) -> TransferTimeout:
    """Of a worker that waited in vain."""
    error = TransferTimeout(f"{waited_for} said nothing", worker=worker, stage="received")
    error.waited_for = waited_for
    return error


async def test_a_sync_that_all_load_is_done_at_once() -> None:
    async with fleet_of(2) as run:
        figures = await run.sync()
        assert (figures.weight_version, figures.bytes) == (VERSION, 200)
        assert run.serving == [0, 1]
        assert (await run.sync()).weight_version == VERSION
        assert run.synchronizer.calls == ["connect", "sync [0, 1]", "sync [0, 1]"]
        assert run.retries == []


async def test_a_sync_at_whose_end_an_engine_dies_is_done_without_it() -> None:
    """It has answered that it loaded everything, and is gone before that is noted."""

    def one_dies(world: Scripted, engines: list[ScriptedEngine]) -> None:
        all_load(world, engines)
        world.note_death(engines[0])

    async with fleet_of(2, one_dies) as run:
        await run.sync()
        assert run.serving == [1]
        assert run.scripted.phase(0) is EnginePhase.DEAD
        assert run.retries == []
        # The replacement is connected to and gets the weights with the next one.
        await run.scripted.until(2, EnginePhase.OUTDATED)
        await run.sync()
        assert run.serving == [1, 2]
        assert run.synchronizer.calls[2:] == ["reconnect", "sync [1, 2]"]


async def test_a_sync_at_whose_end_all_die_is_tried_again_with_who_is_there() -> None:
    """The replacement of the first one has joined before the last one died."""

    def all_die(world: Scripted, engines: list[ScriptedEngine]) -> None:
        all_load(world, engines)
        world.note_death(engines[0])
        joined = world.run.until(2, EnginePhase.OUTDATED)
        asyncio.run_coroutine_threadsafe(joined, world.loop).result()
        world.note_death(engines[1])

    async with fleet_of(2, all_die) as run:
        slow = ScriptedEngine()
        slow.starts = asyncio.Event().wait
        # The two that are there have been started.
        run.scripted.upcoming = [ScriptedEngine(), slow]
        figures = await run.sync()
        assert (figures.weight_version, figures.bytes) == (VERSION, 100)
        assert run.retries == [(VERSION, ALL_DIED)]
        assert run.synchronizer.calls == ["connect", "sync [0, 1]", "reconnect", "sync [2]"]
        assert run.serving == [2]


async def test_a_sync_at_whose_end_all_die_waits_for_a_replacement() -> None:
    def all_die(world: Scripted, engines: list[ScriptedEngine]) -> None:
        all_load(world, engines)
        for engine in engines:
            world.note_death(engine)

    async with fleet_of(2, all_die, min_healthy=0) as run:
        late = ScriptedEngine()
        late.starts = lambda: run.scripted.fleet.until(lambda state: state.sync is None)
        run.scripted.upcoming = [late, late]
        await run.sync()
        assert run.retries == []
        assert run.serving[0] in (2, 3)


def one_is_killed(world: Scripted, engines: list[ScriptedEngine]) -> None:
    """In the middle: the others notice, and are left with a mixture."""
    engines[0].died = True
    for engine in engines[1:]:
        engine.state = Poisoned(world.version, "rank 1 of the policy is lost")
    echo = PeerLost("rank 0 is lost", worker="rollout 1", stage="received")
    world.fail(echo, ActorDiedError(), *(echo for _ in engines[1:]))


async def test_a_sync_in_which_an_engine_is_killed_is_tried_again_without_it() -> None:
    async with fleet_of(3, one_is_killed) as run:
        await run.sync()
        assert [version for version, _ in run.retries] == [VERSION]
        assert "rank 0 is lost" in run.retries[0][1]
        assert run.synchronizer.calls[2:] == ["reconnect", "sync [1, 2]"]
        assert run.serving == [1, 2]


async def test_a_sync_that_kills_the_only_engine_waits_for_a_replacement() -> None:
    async with fleet_of(1, one_is_killed, min_healthy=0) as run:
        await run.sync()
        assert run.retries == []
        assert run.synchronizer.calls == ["connect", "sync [0]", "reconnect", "sync [1]"]
        assert run.serving == [1]


async def test_who_still_serves_the_weights_of_before_gets_the_new_ones() -> None:
    """The attempt failed before they began to load."""

    def killed_at_once(world: Scripted, engines: list[ScriptedEngine]) -> None:
        engines[0].died = True
        engines[1].state = Serving(world.version - 1)
        world.fail(ActorDiedError(), ActorDiedError(), None)

    async with fleet_of(2, killed_at_once) as run:
        await run.sync()
        assert run.synchronizer.calls == ["connect", "sync [0, 1]", "reconnect", "sync [1]"]
        assert run.serving == [1]


async def test_an_engine_that_says_that_it_did_not_load_is_left_out() -> None:
    def refused(world: Scripted, engines: list[ScriptedEngine]) -> None:
        for engine in engines:
            engine.state = Poisoned(world.version, "not all was loaded")
        world.fail(RefitError("an engine did not load"), False, None)

    async with fleet_of(2, refused) as run:
        await run.sync()
        assert run.synchronizer.calls[-1] == "sync [1]"
        assert run.serving == [1]


async def test_an_engine_whose_step_ended_with_its_death_is_dead_whatever_its_probe_does() -> None:
    def dies_and_hangs(world: Scripted, engines: list[ScriptedEngine]) -> None:
        engines[0].silent.set()
        world.fail(ActorDiedError(), ActorDiedError(), None)

    async with fleet_of(2, dies_and_hangs) as run:
        await run.sync()
        assert run.scripted.phase(0) is EnginePhase.DEAD
        assert run.serving == [1]


async def test_an_engine_that_fails_is_left_out_and_gets_the_weights_the_next_time() -> None:
    def one_fails(world: Scripted, engines: list[ScriptedEngine]) -> None:
        engines[0].state = Poisoned(world.version, "no memory")
        engines[1].state = Poisoned(world.version, "another one failed")
        echo = PeerLost("rank 0 is lost", worker="rollout 1", stage="received")
        world.fail(RefitError("no memory"), RefitError("no memory"), echo)

    async with fleet_of(2, one_fails) as run:
        await run.sync()
        assert run.serving == [1]
        assert run.scripted.phase(0) is EnginePhase.POISONED
        assert run.scripted.fleet.sync_is_due()
        await run.sync()
        assert run.serving == [0, 1]


async def test_who_had_all_before_the_attempt_failed_is_not_asked_to_load_it_again() -> None:
    def last_is_killed(world: Scripted, engines: list[ScriptedEngine]) -> None:
        all_load(world, engines[:-1])
        engines[-1].died = True
        world.fail(ActorDiedError(), *(None for _ in engines[:-1]), ActorDiedError())

    async with fleet_of(3, last_is_killed) as run:
        await run.sync()
        assert run.serving == [0, 1]
        assert run.retries == []
        assert run.synchronizer.calls == ["connect", "sync [0, 1, 2]"]


async def test_an_engine_that_does_not_answer_after_a_sync_is_left_out() -> None:
    def one_hangs(world: Scripted, engines: list[ScriptedEngine]) -> None:
        engines[0].silent.set()
        engines[1].state = Poisoned(world.version, "it waited in vain")
        world.fail(RefitError("timed out"))

    async with fleet_of(2, one_hangs) as run:
        await run.sync()
        assert run.serving == [1]
        assert run.scripted.phase(0) is EnginePhase.POISONED


async def test_a_failure_for_which_no_engine_is_to_blame_ends_the_sync() -> None:
    def refused(world: Scripted, engines: list[ScriptedEngine]) -> None:
        world.fail(RefitError("the policy has no weights"))

    async with fleet_of(2, refused) as run:
        with pytest.raises(RefitError, match="the policy has no weights"):
            await run.sync()
        assert run.retries == []
        assert run.serving == []
        # It is over: the next one begins anew, and connects anew.
        await run.sync()
        assert run.synchronizer.calls == ["connect", "sync [0, 1]", "reconnect", "sync [0, 1]"]


async def test_an_actor_that_is_gone_and_no_engine_is_the_trainers() -> None:
    def trainer_dies(world: Scripted, engines: list[ScriptedEngine]) -> None:
        echo = PeerLost("it is lost", worker="rollout 0", stage="received")
        for engine in engines:
            engine.state = Poisoned(world.version, "the policy is lost")
        died = ActorDiedError()
        world.fail(died, *(echo for _ in engines), policy=(None, died))

    async with fleet_of(2, trainer_dies) as run:
        with pytest.raises(TrainerLost, match="policy worker 1 is gone"):
            await run.sync()
        assert [run.scripted.phase(each) for each in (0, 1)] == [EnginePhase.POISONED] * 2


async def test_a_stuck_policy_worker_blames_no_engine_and_ends_the_run_by_its_name() -> None:
    """All that waited for it gave up before it was."""

    def trainer_is_stuck(world: Scripted, engines: list[ScriptedEngine]) -> None:
        stuck = WorkerUnresponsive(["policy worker 1"], "it has not ended its part in time")
        for engine in engines:
            engine.state = Poisoned(world.version, "policy 1 said nothing")
        late = [timeout(f"rollout {place}", "policy 1") for place in range(len(engines))]
        world.fail(stuck, *late, policy=(None, stuck))

    async with fleet_of(2, trainer_is_stuck) as run:
        with pytest.raises(
            TrainerLost, match=r"policy worker 1 does not answer: .* and end it; the same"
        ):
            await run.sync()
        engines = run.scripted.fleet.state.engines
        assert [record.failed_syncs for record in engines.values()] == [0, 0]
        assert run.retries == []


async def test_a_policy_worker_that_only_came_late_blames_no_engine_either() -> None:
    def trainer_is_late(world: Scripted, engines: list[ScriptedEngine]) -> None:
        for engine in engines:
            engine.state = Poisoned(world.version, "policy 0 said nothing")
        late = timeout("rollout 0", "policy 0")
        echo = PeerFailed("rollout 0 failed", worker="policy 0", stage="sent")
        world.fail(late, late, timeout("rollout 1", "policy 0"), policy=(echo,))

    async with fleet_of(2, trainer_is_late) as run:
        with pytest.raises(TransferTimeout, match="policy 0 said nothing"):
            await run.sync()
        engines = run.scripted.fleet.state.engines
        assert [record.failed_syncs for record in engines.values()] == [0, 0]


async def test_a_trainer_that_is_lost_with_an_engine_ends_the_run_at_once() -> None:
    def both_die(world: Scripted, engines: list[ScriptedEngine]) -> None:
        engines[0].died = True
        died = ActorDiedError()
        world.fail(
            died, died, PeerLost("gone", worker="rollout 1", stage="received"), policy=(died,)
        )

    async with fleet_of(2, both_die) as run:
        with pytest.raises(TrainerLost, match="policy worker 0 is gone"):
            await run.sync()
        assert run.retries == []


async def test_an_engine_that_a_policy_worker_waited_for_in_vain_is_left_out() -> None:
    def one_is_late(world: Scripted, engines: list[ScriptedEngine]) -> None:
        for engine in engines:
            engine.state = Poisoned(world.version, "policy 0 failed")
        echo = PeerFailed("policy 0 failed", worker="rollout 1", stage="received")
        late = timeout("policy 0", "rollout 0")
        world.fail(late, echo, echo, policy=(late,))

    async with fleet_of(2, one_is_late) as run:
        await run.sync()
        assert run.serving == [1]
        assert run.synchronizer.calls[-1] == "sync [1]"


async def test_engines_that_load_another_version_than_the_trainers_serve_nothing() -> None:
    async with fleet_of(1) as run:
        run.synchronizer.version = VERSION - 1
        with pytest.raises(RefitError, match=r"weight version 3, and the trainer is at 4"):
            await run.sync()
        assert run.scripted.phase(0) is EnginePhase.POISONED


async def test_engines_that_are_lost_beside_a_sync_that_fails_are_why_the_run_ends() -> None:
    def another_dies(world: Scripted, engines: list[ScriptedEngine]) -> None:
        world.note_death(world.run.made[1])
        world.fail(RefitError("the policy has no weights"))

    async with fleet_of(2, another_dies, min_healthy=2) as run:
        for number in (0, 1):
            await run.scripted.until(number, EnginePhase.OUTDATED)
        run.scripted.fleet.apply(ProbeMissed("engine-1"))
        with pytest.raises(EnginesLost):
            await run.sync()
        assert run.synchronizer.calls == ["connect", "sync [0]"]


async def test_with_too_few_engines_left_the_sync_says_so() -> None:
    async with fleet_of(2, one_is_killed, min_healthy=2) as run:
        with pytest.raises(EnginesLost, match="1 generation engines are left"):
            await run.sync()
        with pytest.raises(EnginesLost):
            await run.sync()
        assert run.synchronizer.calls == ["connect", "sync [0, 1]"]
