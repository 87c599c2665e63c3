"""Two policy workers train what one would, hold the same bits, and never wait in silence."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from ray.exceptions import RayActorError
from safetensors.torch import load_file

from rollsync.shell.demo.model import WarmUp, make_checkpoint
from rollsync.shell.grpo import GrpoTrainer, StepMetrics, TrainingRow
from rollsync.shell.grpo.client import (
    GrpoTrainerClient,
    ReplicasDiverged,
    TrainerNotStarted,
    answers_of,
)
from rollsync.shell.grpo.replicas import ReplicaUnreachable
from rollsync.shell.grpo.trainer import OPTIMIZER, WEIGHTS, TrainerCheckpointError
from rollsync.shell.rollout.clients import TrainerLost
from tests.shell.grpo.replica_workers import GRPO, config_of, tell, two_workers
from tests.shell.grpo.test_trainer import EXAMPLES, row

pytestmark = pytest.mark.timeout(180)

_T = TypeVar("_T")
Batch = list[list[TrainingRow]]


def group(first: int, *, masked: bool = False) -> list[TrainingRow]:
    return [row([3, 4, first, 6, 9], 1.0), row([3, 4, first + 1], 0.0, masked=masked)]


BATCHES: tuple[Batch, ...] = (
    [group(5), group(6), group(7)],
    [group(8)],  # The second worker has nothing to do.
    [group(5), group(9, masked=True)],
    [group(4), group(7), group(9), group(6)],
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, EXAMPLES, WarmUp(until_loss=0.0, max_steps=2))
    return str(directory)


class Together:
    """Two workers and the loop that they are driven from."""

    def __init__(self, client: GrpoTrainerClient, loop: asyncio.Runner) -> None:
        self.client = client
        self._loop = loop

    def wait(self, what: Awaitable[_T]) -> _T:
        async def awaited() -> _T:
            return await what

        return self._loop.run(awaited())

    def train(self, batches: Sequence[Batch]) -> list[StepMetrics]:
        metrics = []
        for batch in batches:
            metrics.append(self.wait(self.client.compute_gradients(batch)))
            self.wait(self.client.apply_gradients())
        return metrics

    def saved(self, directory: Path) -> Path:
        directory.mkdir()
        self.wait(self.client.save(directory))
        return directory


@pytest.fixture(scope="module")
def pair(
    cluster: None, model_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Together]:
    client = two_workers(config_of(model_path, tmp_path_factory.mktemp("run")))
    with asyncio.Runner() as loop:
        loop.run(client.start())
        yield Together(client, loop)
        loop.run(client.__aexit__(None, None, None))


@pytest.fixture
def together(pair: Together, model_path: str, tmp_path: Path) -> Together:
    """The two workers, at the model's weights."""
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    alone(model_path).save(fresh)
    pair.wait(pair.client.load(fresh))
    return pair


def alone(model_path: str) -> GrpoTrainer:
    return GrpoTrainer(model_path, GRPO, temperature=1.0, threads=1, deterministic=True)


def files_of(directory: Path) -> list[bytes]:
    names = (Path(WEIGHTS) / "model.safetensors", Path(OPTIMIZER))
    return [(directory / name).read_bytes() for name in names]


def test_two_workers_train_what_one_does_up_to_rounding(
    together: Together, model_path: str, tmp_path: Path
) -> None:
    one = alone(model_path)
    expected = []
    for batch in BATCHES:
        expected.append(one.compute_gradients(batch))
        one.apply_gradients()
    found = together.train(BATCHES)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.mean_reward == theirs.mean_reward
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4, abs=1e-6)
        assert mine.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-4)
    assert together.client.trainer_version == len(BATCHES)
    weights = load_file(together.saved(tmp_path / "two") / WEIGHTS / "model.safetensors")
    for name, weight in one.module.named_parameters():
        if name in weights:
            # Adam takes steps of the learning rate whatever the gradient's size.
            assert (weights[name] - weight).abs().max() < 0.05 * GRPO.learning_rate, name


def test_a_loaded_pair_goes_on_bit_for_bit(together: Together, tmp_path: Path) -> None:
    together.train(BATCHES[:2])
    middle = together.saved(tmp_path / "middle")
    together.train(BATCHES[2:])
    first = files_of(together.saved(tmp_path / "first"))
    together.wait(together.client.load(middle))
    assert together.client.trainer_version == 2
    together.train(BATCHES[2:])
    assert files_of(together.saved(tmp_path / "second")) == first


def test_a_checkpoint_does_not_know_how_many_workers_wrote_it(
    together: Together, model_path: str, tmp_path: Path
) -> None:
    together.train(BATCHES[:1])
    by_two = together.saved(tmp_path / "two")
    one = alone(model_path)
    one.load(by_two)
    by_one = tmp_path / "one"
    by_one.mkdir()
    one.save(by_one)
    assert files_of(by_one) == files_of(by_two)


def test_a_step_with_nothing_to_train_counts_on_both(together: Together) -> None:
    together.wait(together.client.skip_step())
    together.train(BATCHES[:1])
    assert together.client.trainer_version == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_replicas_that_differ_by_a_bit_are_told_apart(together: Together, rank: int) -> None:
    tell(together.client, rank, "drift")
    with pytest.raises(ReplicasDiverged, match="policy worker 1: version 1, weights"):
        together.train(BATCHES[:1])


def test_a_checkpoint_that_workers_cannot_read_is_refused_with_a_rank(
    together: Together, tmp_path: Path
) -> None:
    with pytest.raises(TrainerCheckpointError, match=r"policy worker [01]: .* no whole trainer"):
        together.wait(together.client.load(tmp_path / "nowhere"))


def test_an_error_of_one_worker_is_told_while_the_other_waits(
    cluster: None, model_path: str, tmp_path: Path
) -> None:
    unknown_token = [[row([3, 4, 10**6], 1.0), row([3, 4, 5], 0.0)]]

    async def train() -> None:
        async with two_workers(config_of(model_path, tmp_path)) as client:
            await client.start()
            await client.compute_gradients([*BATCHES[1], *unknown_token])

    with pytest.raises(IndexError) as told:
        asyncio.run(train())
    assert "on policy worker 1" in told.value.__notes__


def test_a_worker_that_cannot_start_says_why(cluster: None, tmp_path: Path) -> None:
    model = tmp_path / "empty"
    model.mkdir()

    async def start() -> None:
        async with two_workers(config_of(str(model), tmp_path)) as client:
            await client.start()

    with pytest.raises(TrainerNotStarted, match=r"policy worker [01] did not start: \w*Error: "):
        asyncio.run(start())


@pytest.mark.slow
def test_a_worker_that_is_halted_is_named_after_the_timeout(
    cluster: None, model_path: str, tmp_path: Path
) -> None:
    """In each kind of call. One that is let go does what it was asked for meanwhile."""
    saved = tmp_path / "saved"
    saved.mkdir()
    pids: list[int] = []

    async def train() -> None:
        async with two_workers(config_of(model_path, tmp_path, collective_timeout_s=5)) as client:
            await client.start()
            await client.save(saved)
            pid = await asyncio.to_thread(tell, client, 1, "pid")
            assert isinstance(pid, int)
            pids.append(pid)
            calls = (partial(client.load, saved), client.skip_step, client.apply_gradients)
            for call in calls:
                await client.compute_gradients(BATCHES[0])
                os.kill(pid, signal.SIGSTOP)
                with pytest.raises(TrainerLost, match=r"^policy worker 1 does not answer: nothing"):
                    await call()
                os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGSTOP)
            await client.compute_gradients(BATCHES[0])

    with pytest.raises(TrainerLost, match="policy worker 1 does not answer: policy worker 0 of 2"):
        asyncio.run(train())
    wait_until_gone(pids[0])


def wait_until_gone(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").exists() and not _is_dead(pid):
        signal.sigtimedwait((), 0.05)


def _is_dead(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"


SOON_S = 30.0
UNREACHABLE = ReplicaUnreachable("policy worker 0 of 3 did not hear from all others")


async def _after(delay_s: float, outcome: int | Exception) -> int:
    await asyncio.sleep(delay_s)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def _never() -> int:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")


def test_all_answers_come_by_rank() -> None:
    calls = [_after(0.02, 7), _after(0.0, 8)]
    assert asyncio.run(answers_of(calls, timeout_s=SOON_S, runs_from_start=True)) == [7, 8]


def test_a_worker_that_is_silent_is_named_after_the_timeout() -> None:
    async def ask(calls: list[Awaitable[int]], *, runs_from_start: bool) -> None:
        await answers_of(calls, timeout_s=0.05, runs_from_start=runs_from_start)

    with pytest.raises(TrainerLost, match=r"^policy worker 0, 2 does not .* within 0\.05 s \("):
        asyncio.run(ask([_never(), _after(0, 1), _never()], runs_from_start=True))
    after = r"^policy worker 1 does not .* 0\.05 s after another had done the same \("
    with pytest.raises(TrainerLost, match=after):
        asyncio.run(ask([_after(0, 1), _never()], runs_from_start=False))


def test_the_first_answer_may_take_as_long_as_it_does() -> None:
    calls = [_after(0.2, 7), _after(0.25, 8)]
    assert asyncio.run(answers_of(calls, timeout_s=0.15, runs_from_start=False)) == [7, 8]


@pytest.mark.parametrize(
    ("calls", "expected", "words"),
    [
        # Its peers know of an end before Ray does.
        (
            lambda: [_after(0, UNREACHABLE), _after(0.05, RayActorError()), _never()],
            TrainerLost,
            "policy worker 1 is gone",
        ),
        (lambda: [_never(), _after(0, RayActorError())], TrainerLost, "policy worker 1 is gone"),
        (lambda: [_after(0, UNREACHABLE), _after(0.05, ValueError("row"))], ValueError, "row"),
        (lambda: [_after(0, UNREACHABLE)] * 1, TrainerLost, "did not hear from all others"),
    ],
)
def test_the_failure_of_the_worker_at_fault_is_told(
    calls: Callable[[], list[Awaitable[int]]], expected: type[Exception], words: str
) -> None:
    async def ask() -> None:
        await answers_of(calls(), timeout_s=SOON_S, runs_from_start=False)

    with pytest.raises(expected, match=words):
        asyncio.run(ask())
