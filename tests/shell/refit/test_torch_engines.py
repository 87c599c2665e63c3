"""Real Ray actors: a torch policy, torch engines, and what becomes of the weights between them."""

import asyncio
import os
import signal
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rollsync.pure.refit.lifecycle import Poisoned, Serving
from rollsync.pure.refit.routes import NOTHING_TO_RELAY
from rollsync.shell.refit import CheckpointEngineWeightSynchronizer
from rollsync.shell.refit.engines.metadata import HOST_LABEL
from rollsync.shell.refit.errors import (
    EngineNotServing,
    EngineOutdated,
    RefitConfigurationError,
    WeightMismatch,
    WorkerGone,
    WorkerUnresponsive,
)
from rollsync.shell.refit.generation import Completion, SamplingSettings
from rollsync.shell.refit.report import SyncMetrics
from rollsync.shell.refit.torch_generation import TorchGenerationWorker
from rollsync.shell.refit.worker_group import GenerationGroup, PolicyGroup
from tests.shell.actor_processes import kill_actor
from tests.shell.conftest import ENVIRONMENT
from tests.shell.operations import metrics
from tests.shell.refit.overwriting_engine import OVERWRITING
from tests.shell.refit.reference import SEED, reference_answer
from tests.shell.refit.tiny_models import TinyPolicy, save_model

PROMPT = [5, 6, 7]
GREEDY = SamplingSettings(max_new_tokens=8, temperature=0.0)
SAMPLED = SamplingSettings(max_new_tokens=8, n=3, top_k=50, top_p=0.9, temperature=0.8)
WEIGHTS = 27


@dataclass
class Actors:
    """A policy worker and three engines; `late` takes part in one test only."""

    policy: Any
    early: Any
    other: Any
    late: Any


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the engines' first weights are."""
    return save_model(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def actors(cluster: None, model: str) -> Actors:
    engine = ray.remote(TorchGenerationWorker).options(num_cpus=0)
    policy: Any = ray.remote(TinyPolicy).options(num_cpus=0).remote()
    early, other, late = (engine.remote(model, threads=1) for _ in range(3))
    return Actors(policy, early, other, late)


def ask(
    generation: GenerationGroup, sampling: SamplingSettings = GREEDY, **kwargs: Any
) -> list[Completion]:
    async def run() -> list[Completion]:
        return await generation.generate(PROMPT, sampling, seed=SEED, **kwargs)

    return asyncio.run(run())


def version_of(generation: GenerationGroup) -> int | None:
    return asyncio.run(generation.weight_version())


def synchronizer(
    policy: Any, generation: GenerationGroup, backend: str = "shm", **options: Any
) -> CheckpointEngineWeightSynchronizer:
    return CheckpointEngineWeightSynchronizer(
        PolicyGroup([policy]),
        generation,
        {
            "backend": backend,
            "update_weights_bucket_memory_ratio": 0.001,
            "engine_kwargs": {backend: options},
        },
    )


def test_engines_answer_as_the_policy_would(actors: Actors, tmp_path: Path) -> None:
    generation = GenerationGroup([actors.early, actors.other])
    sync = synchronizer(actors.policy, generation)
    sync.init_communicator()
    for _ in range(2):
        saved = str(tmp_path / "saved")
        version = ray.get(actors.policy.step.remote(saved))
        report = sync.sync_weights()
        assert (report.weight_version, report.rollout_workers) == (version, 2)
        assert (report.tensors, report.buckets, report.batches) == (WEIGHTS, 1, 1)
        assert version_of(generation) == version
        # Both engines, one after the other.
        for sampling in (GREEDY, GREEDY, SAMPLED, SAMPLED):
            assert ask(generation, sampling) == reference_answer(saved, PROMPT, sampling, version)
        with pytest.raises(EngineOutdated):
            ask(generation, weight_version=version + 1)


def test_engines_of_one_policy_worker_are_fed_as_they_lie(actors: Actors, tmp_path: Path) -> None:
    """Three engines, of which one is on another host, as far as the engines can tell."""
    away: Any = (
        ray.remote(TorchGenerationWorker)
        .options(num_cpus=0, runtime_env={"env_vars": {**ENVIRONMENT, HOST_LABEL: "elsewhere"}})
        .remote(save_model(tmp_path / "start"), threads=1)
    )
    generation = GenerationGroup([actors.early, away, actors.other])
    sync = synchronizer(actors.policy, generation, "auto")
    for _ in range(2):
        saved = str(tmp_path / "saved")
        version = ray.get(actors.policy.step.remote(saved))
        report = sync.sync_weights()
        assert [choice.engine for choice in report.choices] == ["shm", "nixl", "shm"]
        assert report.choices[1].reason.endswith("/elsewhere")
        assert "through nixl (1) and shm (2): " in str(report)
        assert (report.tensors, report.rollout_workers) == (WEIGHTS, 3)
        for _ in range(3):
            assert ask(generation) == reference_answer(saved, PROMPT, GREEDY, version)
    sync.shutdown()
    ray.kill(away)


def test_relays_that_no_link_has_need_of_are_said_to_be_none(
    actors: Actors, caplog: pytest.LogCaptureFixture
) -> None:
    generation = GenerationGroup([actors.early, actors.other])
    for relay in (False, True):
        caplog.clear()
        sync = synchronizer(actors.policy, generation, "auto", relay=relay)
        with caplog.at_level("INFO"):
            sync.reconnect()
        sync.shutdown()
        assert (NOTHING_TO_RELAY in caplog.messages) == relay


def test_engines_on_other_hosts_relay_to_each_other(actors: Actors, tmp_path: Path) -> None:
    """Two engines on one host and one on a third host, as far as the engines can tell."""
    model = save_model(tmp_path / "start")
    engines: list[Any] = [
        ray.remote(TorchGenerationWorker)
        .options(num_cpus=0, runtime_env={"env_vars": {**ENVIRONMENT, HOST_LABEL: host}})
        .remote(model, threads=1)
        for host in ("a", "a", "b")
    ]
    generation = GenerationGroup(engines)
    sync = synchronizer(actors.policy, generation, "auto", relay=True)
    for _ in range(2):
        saved = str(tmp_path / "saved")
        version = ray.get(actors.policy.step.remote(saved))
        report = sync.sync_weights()
        assert [str(choice).partition(":")[0] for choice in report.choices] == [
            "policy 0 to rollout 0 by nixl",
            "rollout 0 to rollout 1 by shm",
            "rollout 0 to rollout 2 by nixl",
        ]
        assert (report.tensors, report.rollout_workers) == (WEIGHTS, 3)
        for _ in range(3):
            assert ask(generation) == reference_answer(saved, PROMPT, GREEDY, version)
    kill_actor(engines[0])
    with pytest.raises(WorkerGone):
        sync.sync_weights()
    left = GenerationGroup(engines[1:])
    again = synchronizer(actors.policy, left, "auto", relay=True)
    again.reconnect()
    saved = str(tmp_path / "after")
    version = ray.get(actors.policy.step.remote(saved))
    assert again.sync_weights().weight_version == version
    for _ in range(2):
        assert ask(left) == reference_answer(saved, PROMPT, GREEDY, version)
    again.shutdown()
    for engine in engines[1:]:
        ray.kill(engine)


def test_an_engine_that_joins_late_serves_after_the_next_sync(
    actors: Actors, tmp_path: Path
) -> None:
    alone = synchronizer(actors.policy, GenerationGroup([actors.early]))
    alone.sync_weights()
    alone.shutdown()
    both = GenerationGroup([actors.early, actors.late])
    assert version_of(both) is None
    late = GenerationGroup([actors.late])
    with pytest.raises(EngineNotServing):
        ask(late)
    saved = str(tmp_path / "saved")
    version = ray.get(actors.policy.step.remote(saved))
    sync = synchronizer(actors.policy, both)
    sync.init_communicator()
    with pytest.raises(EngineNotServing):
        ask(late)
    sync.sync_weights()
    assert version_of(both) == version
    assert (
        ask(late)
        == ask(GenerationGroup([actors.early]))
        == reference_answer(saved, PROMPT, GREEDY, version)
    )


@pytest.mark.parametrize("sent", [0, 5, WEIGHTS - 1])
@pytest.mark.parametrize("backend", ["shm", OVERWRITING])
def test_a_stream_that_breaks_poisons_the_engine_until_a_whole_one_came(
    actors: Actors, tmp_path: Path, backend: str, sent: int
) -> None:
    generation = GenerationGroup([actors.early])
    options = {"folder": str(tmp_path)} if backend == OVERWRITING else {}
    sync = synchronizer(actors.policy, generation, backend, **options)
    sync.sync_weights()
    assert isinstance(ray.get(actors.early.refit_state.remote()), Serving)
    ray.get([actors.policy.step.remote(), actors.policy.break_after.remote(sent)])
    with pytest.raises(ArithmeticError, match="the iterator broke"):
        sync.sync_weights()
    assert sync.is_stale
    state = ray.get(actors.early.refit_state.remote())
    assert isinstance(state, Poisoned)
    assert "the iterator broke" in state.cause
    assert version_of(generation) is None
    with pytest.raises(EngineNotServing, match="the iterator broke"):
        ask(generation)
    saved = str(tmp_path / "saved")
    ray.get(actors.policy.break_after.remote(None))
    version = ray.get(actors.policy.step.remote(saved))
    sync.sync_weights()
    assert ask(generation) == reference_answer(saved, PROMPT, GREEDY, version)


@pytest.mark.parametrize("backend", ["shm", "nixl"])
def test_a_policy_worker_killed_before_it_connects_is_noticed(
    actors: Actors, tmp_path: Path, backend: str
) -> None:
    generation = GenerationGroup([actors.early])
    doomed: Any = ray.remote(TinyPolicy).options(num_cpus=0).remote()
    sync = synchronizer(doomed, generation, backend, refit_timeout_s=10_000)
    sync.sync_weights()
    ray.get(doomed.die_before_sending.remote())
    with pytest.raises(WorkerGone, match=r"^policy worker 0 is gone: ") as raised:
        sync.sync_weights()
    assert any("rollout 0, while it waited for the sender" in n for n in raised.value.__notes__)
    with pytest.raises(EngineNotServing, match="is gone"):
        ask(generation)
    saved = str(tmp_path / "saved")
    version = ray.get(actors.policy.step.remote(saved))
    fresh = synchronizer(actors.policy, generation, backend)
    fresh.sync_weights()
    assert ask(generation) == reference_answer(saved, PROMPT, GREEDY, version)
    fresh.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "nixl"])
def test_a_policy_worker_that_is_halted_is_named_and_no_engine_is_blamed(
    actors: Actors, backend: str
) -> None:
    generation = GenerationGroup([actors.early, actors.other])
    halted: Any = ray.remote(TinyPolicy).options(num_cpus=0).remote()
    sync = synchronizer(halted, generation, backend, refit_timeout_s=3)
    sync.sync_weights()
    process_id = ray.get(halted.process_id.remote())
    os.kill(process_id, signal.SIGSTOP)
    with pytest.raises(WorkerUnresponsive, match="policy worker 0 does not answer") as raised:
        sync.sync_weights()
    os.kill(process_id, signal.SIGKILL)
    assert any("policy 0 did not come for 3 s" in note for note in raised.value.__notes__)
    assert sync.last_failure is not None
    assert sync.last_failure.engines_to_blame == frozenset()
    for engine in (actors.early, actors.other):
        assert isinstance(ray.get(engine.refit_state.remote()), Poisoned)
    fresh = synchronizer(actors.policy, generation, backend)
    version = fresh.sync_weights().weight_version
    assert version_of(generation) == version
    fresh.shutdown()


def test_a_policy_worker_that_fails_before_its_first_weight_keeps_nobody_waiting(
    actors: Actors,
) -> None:
    generation = GenerationGroup([actors.early])
    sync = synchronizer(actors.policy, generation, refit_timeout_s=10_000)
    ray.get(actors.policy.lose_version.remote(True))
    with pytest.raises(ArithmeticError, match="the version is lost"):
        sync.sync_weights()
    ray.get(actors.policy.lose_version.remote(False))
    with pytest.raises(EngineNotServing, match="the version is lost"):
        ask(generation)
    sync.sync_weights()
    assert version_of(generation) is not None


class RefusingEngine(TorchGenerationWorker):
    """An engine that can fail before it meets the sender."""

    refuses = False

    async def refuse_before_meeting(self, refuses: bool) -> None:
        self.refuses = refuses

    async def checkpoint_engine_rpc_async(
        self, checkpoint_method: str, method_args: tuple[object, ...] = ()
    ) -> object:
        if self.refuses and checkpoint_method.startswith("update_weights"):
            raise ArithmeticError("it does not even begin")
        return await super().checkpoint_engine_rpc_async(checkpoint_method, method_args)


@pytest.mark.parametrize(("backend", "side"), [("shm", "policy"), ("nixl", "engine")])
def test_a_worker_that_lives_and_fails_before_it_meets_the_others_keeps_nobody_waiting(
    actors: Actors, model: str, backend: str, side: str
) -> None:
    refusing: Any = ray.remote(RefusingEngine).options(num_cpus=0).remote(model, threads=1)
    generation = GenerationGroup([actors.early, refusing])
    sync = synchronizer(actors.policy, generation, backend, refit_timeout_s=10_000)
    sync.sync_weights()
    who = actors.policy if side == "policy" else refusing
    ray.get(who.refuse_before_meeting.remote(True))
    with pytest.raises(ArithmeticError, match="it does not even begin"):
        sync.sync_weights()
    assert isinstance(ray.get(actors.early.refit_state.remote()), Poisoned)
    with pytest.raises(ArithmeticError, match="it does not even begin"):
        sync.sync_weights()
    ray.get(who.refuse_before_meeting.remote(False))
    version = ray.get(actors.policy.step.remote())
    sync.sync_weights()
    assert version_of(generation) == version
    sync.shutdown()


def test_release_after_refit_leaves_the_engine_serving(actors: Actors) -> None:
    generation = GenerationGroup([actors.early])
    sync = synchronizer(actors.policy, generation, release_after_refit=True)
    for _ in range(2):
        version = ray.get(actors.policy.step.remote())
        sync.sync_weights()
        state = ray.get(actors.early.refit_state.remote())
        assert state == Serving(version, connected=False)
        assert ask(generation)[0].weight_version == version


def test_a_policy_of_another_architecture_is_refused_by_the_weight(actors: Actors) -> None:
    generation = GenerationGroup([actors.other])
    generation.prepare_refit_info({"not rollsync's": (3, "float32")})
    ray.get(actors.policy.remake.remote(vocabulary=32))
    with pytest.raises(WeightMismatch, match=r"model\.embed_tokens\.weight"):
        synchronizer(actors.policy, generation).sync_weights()
    ray.get(actors.policy.remake.remote())
    synchronizer(actors.policy, generation).sync_weights()
    assert version_of(generation) is not None


def test_another_declared_dtype_is_an_error_that_names_the_weight_before_any_is_sent(
    actors: Actors,
) -> None:
    generation = GenerationGroup([actors.early])
    declared = ray.get(actors.policy.prepare_refit_info.remote())
    name = "model.layers.0.mlp.up_proj.weight"
    generation.prepare_refit_info({**declared, name: (declared[name].shape, torch.bfloat16)})
    sync = synchronizer(actors.policy, generation)
    with pytest.raises(WeightMismatch, match=rf"{name}.*whose dtype differs"):
        sync.sync_weights()
    with pytest.raises(EngineNotServing, match="declare different weights"):
        ask(generation)
    generation.prepare_refit_info(declared)
    sync.sync_weights()
    assert version_of(generation) is not None


def test_only_steps_of_the_life_cycle_can_be_called(actors: Actors) -> None:
    with pytest.raises(RefitConfigurationError, match="'step'"):
        ray.get(actors.policy.checkpoint_engine_rpc.remote("step"))
    with pytest.raises(RefitConfigurationError, match="'generate'"):
        ray.get(actors.early.checkpoint_engine_rpc_async.remote("generate"))


def test_figures_reach_prometheus(actors: Actors) -> None:
    synchronizer(actors.policy, GenerationGroup([actors.early])).sync_weights()
    (node,) = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = {name for name in metrics() if name.startswith("rollsync_refit_")}
    SyncMetrics().failed("shm")
    deadline_s = time.monotonic() + 60
    text = ""
    while not all(name in text for name in wanted):
        assert time.monotonic() < deadline_s, text
        time.sleep(0.5)
        with urllib.request.urlopen(address, timeout=10) as answer:
            text = answer.read().decode()
    assert 'backend="shm"' in text
