"""A real vLLM engine whose weights come from a policy, and from nowhere else."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rollsync.pure.refit.lifecycle import Closed, Poisoned, Serving
from rollsync.shell.refit.errors import EngineNotServing, EngineOutdated, EngineStepFailed
from rollsync.shell.refit.generation import Completion, SamplingSettings
from rollsync.shell.refit.worker_group import GenerationGroup
from tests.shell.refit.overwriting_engine import OVERWRITING
from tests.shell.refit.tiny_models import TinyPolicy, save_model
from tests.shell.refit.vllm_engines import (
    GREEDY,
    PROMPT,
    answer_of_a_fresh_engine,
    async_engine,
    saved_step,
    synchronizer,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VOCABULARY = 8000
"""Embeddings of 2 MB, which vLLM pads, so that weights fill several small buckets."""


@dataclass
class Actors:
    policy: Any
    engine: Any

    @property
    def generation(self) -> GenerationGroup:
        return GenerationGroup([self.engine])


@pytest.fixture(scope="module")
def actors(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Actors]:
    start = save_model(tmp_path_factory.mktemp("start"), vocabulary=VOCABULARY)
    policy: Any = ray.remote(TinyPolicy).options(num_cpus=0).remote(vocabulary=VOCABULARY)
    engine = async_engine(start)
    yield Actors(policy, engine)
    ray.get(engine.stop.remote())


def ask(
    generation: GenerationGroup, sampling: SamplingSettings = GREEDY, **kwargs: Any
) -> list[Completion]:
    async def run() -> list[Completion]:
        return await generation.generate(PROMPT, sampling, seed=11, **kwargs)

    return asyncio.run(run())


def test_the_engine_answers_as_a_fresh_one_started_from_the_saved_weights(
    actors: Actors, tmp_path: Path
) -> None:
    with pytest.raises(EngineNotServing):
        ask(actors.generation)
    sync = synchronizer(actors.policy, actors.generation)
    sync.init_communicator()
    with pytest.raises(EngineNotServing):
        ask(actors.generation)
    sync.sync_weights()
    before = ask(actors.generation)
    saved, version = saved_step(actors.policy, tmp_path)
    report = sync.sync_weights()
    assert (report.weight_version, report.batches) == (version, 1)
    after = ask(actors.generation, weight_version=version)
    assert after == answer_of_a_fresh_engine(saved, version)
    assert after[0].token_ids != before[0].token_ids
    with pytest.raises(EngineOutdated):
        ask(actors.generation, weight_version=before[0].weight_version)


def test_the_same_weights_give_the_same_logits_whatever_way_they_came(
    actors: Actors, tmp_path: Path
) -> None:
    sync = synchronizer(actors.policy, actors.generation)
    assert sync.sync_weights().batches == 1
    once = ask(actors.generation)
    sync.sync_weights()
    assert ask(actors.generation) == once
    sync.shutdown()
    many = synchronizer(actors.policy, actors.generation, bucket_mebibytes=1)
    assert many.sync_weights().batches >= 4
    assert ask(actors.generation) == once
    many.shutdown()
    # Every weight alone, and overwritten as soon as the next one is asked for.
    alone = synchronizer(actors.policy, actors.generation, OVERWRITING, folder=str(tmp_path))
    assert alone.sync_weights().batches > 20
    assert ask(actors.generation) == once
    alone.shutdown()


def test_completions_are_reproduced_by_their_seed(actors: Actors) -> None:
    synchronizer(actors.policy, actors.generation).sync_weights()
    sampled = SamplingSettings(max_new_tokens=6, n=3, temperature=0.9)
    completions = ask(actors.generation, sampled)
    assert len({completion.token_ids for completion in completions}) == 3
    assert [c.token_ids for c in ask(actors.generation, sampled)] == [
        c.token_ids for c in completions
    ]
    for completion in completions:
        assert len(completion.token_ids) == len(completion.logprobs) == 6
        assert completion.finish_reason == "length"
        assert all(logprob <= 0 for logprob in completion.logprobs)
    stop = completions[0].token_ids[2]
    (stopped,) = ask(
        actors.generation,
        SamplingSettings(max_new_tokens=6, temperature=0.9, stop_token_ids=(stop,)),
    )
    assert stopped.token_ids == completions[0].token_ids[:3]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("broken", ["iterator", "loader"])
def test_a_sync_that_breaks_in_the_middle_is_made_good_by_a_whole_one(
    actors: Actors, tmp_path: Path, broken: str
) -> None:
    sync = synchronizer(actors.policy, actors.generation, bucket_mebibytes=1)
    sync.sync_weights()
    _, version = saved_step(actors.policy, tmp_path)
    if broken == "iterator":
        ray.get(actors.policy.break_after.remote(26))
        expected: type[Exception] = ArithmeticError
    else:
        ray.get(actors.policy.intrude.remote(15, "model.layers.1.mlp.nothing.weight"))
        expected = Exception
    with pytest.raises(expected):
        sync.sync_weights()
    state = ray.get(actors.engine.refit_state.remote())
    assert isinstance(state, Poisoned)
    assert state.version == version
    with pytest.raises(EngineNotServing):
        ask(actors.generation)
    ray.get([actors.policy.break_after.remote(None), actors.policy.intrude.remote(None)])
    saved, version = saved_step(actors.policy, tmp_path)
    sync.sync_weights()
    assert ray.get(actors.engine.refit_state.remote()) == Serving(version)
    assert ask(actors.generation) == answer_of_a_fresh_engine(saved, version)
    sync.shutdown()


def test_requests_of_before_and_after_a_sync_are_each_of_one_version(actors: Actors) -> None:
    sync = synchronizer(actors.policy, actors.generation)
    sync.sync_weights()
    old = ask(actors.generation)
    long = SamplingSettings(max_new_tokens=100, temperature=0.0)

    async def run() -> tuple[list[Completion], list[Completion]]:
        running = asyncio.create_task(actors.generation.generate(PROMPT, long, seed=11))
        await asyncio.sleep(0.05)
        await actors.policy.step.remote()
        await asyncio.to_thread(sync.sync_weights)
        return await running, await actors.generation.generate(PROMPT, long, seed=11)

    before, after = asyncio.run(run())
    assert before[0].weight_version == old[0].weight_version
    assert before[0].token_ids[: len(old[0].token_ids)] == old[0].token_ids
    assert after[0].weight_version == before[0].weight_version + 1
    assert after[0].token_ids != before[0].token_ids


def test_an_engine_whose_processes_have_ended_says_so_and_refuses(actors: Actors) -> None:
    """The last test of this engine."""
    sync = synchronizer(actors.policy, actors.generation)
    sync.sync_weights()
    probe = ray.get(actors.engine.probe.remote())
    for process in psutil.Process(probe.pid).children(recursive=True):
        process.kill()
    with pytest.raises(EngineStepFailed, match="vLLM's processes have ended"):
        sync.sync_weights()
    assert ray.get(actors.engine.refit_state.remote()) == Closed()
    with pytest.raises(EngineNotServing):
        ask(actors.generation)
