"""What every checkpoint engine has to do, as tests that the author of one can run.

    from rollsync.shell.refit.engines.conformance import EngineConformance

    class TestMyEngine(EngineConformance):
        backend = "my_package.my_module:MyEngine"

Run by pytest, each `test_` method uses real processes: this one is the policy worker, and every
rollout worker is a process of its own (see `conformance_workers`).

Rule kept here: nothing but the plug-in contract is used, and no `assert`, so that the suite checks
the same under `python -O`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import ClassVar, Final

import torch

from rollsync.shell.refit.engines.base import CheckpointEngine
from rollsync.shell.refit.engines.conformance_deaths import DyingPolicy
from rollsync.shell.refit.engines.conformance_memory import MEMORY_BUCKET_BYTES, Held, settled
from rollsync.shell.refit.engines.conformance_workers import (
    BUCKET_BYTES,
    TIED,
    Received,
    Rollouts,
    failing_at,
    gathered_weights,
    large_weights,
    sample_weights,
    stream_failing_at,
)
from rollsync.shell.refit.engines.factory import create_checkpoint_engine
from rollsync.shell.refit.errors import RefitConfigurationError

SYNCS: Final = 20
LIVES: Final = 3
FAILURES: Final = (("large.last", ""), ("", "large.last"))
"""At which tensor the iterator fails, or the loader."""
NOTICED_S: Final = 60.0
"""Within which a death is noticed, on a machine that is busy with something else too."""


class EngineConformance:
    """The suite; a subclass names the engine."""

    backend: ClassVar[str]
    """A built-in name, or `module:ClassName`."""
    engine_kwargs: ClassVar[Mapping[str, object]] = {}
    """The engine's own options."""
    environments: ClassVar[Sequence[Mapping[str, str]]] = ()
    """Variables that the first rollout workers have in their environments, where an engine goes by
    them."""

    def test_every_kind_of_tensor_arrives_as_it_is(self) -> None:
        """Strides, dtypes, sizes around a bucket's, no bytes, no dimensions, tied weights."""
        with self._rollouts(1) as rollouts:
            rollouts.send(sample_weights().items())
            self._expect_everything(rollouts)

    def test_a_trainer_that_gathers_into_one_memory_sends_what_it_gathered(self) -> None:
        """Tensors at one address are not one tensor."""
        with self._rollouts(1) as rollouts:
            rollouts.send(gathered_weights())
            self._expect_everything(rollouts)

    def test_twenty_streams_reserve_no_more_than_one(self) -> None:
        """What both ends hold after twenty streams, memory and files, is what they held after the
        first few."""
        with self._rollouts(1, MEMORY_BUCKET_BYTES) as rollouts:
            held: list[Held] = []
            for _ in range(SYNCS):
                rollouts.send(large_weights().items())
                self._expect_large(rollouts)
                held.append(rollouts.held())
            last = settled(rollouts.held, held[2])
            _expect(last.is_about(held[2]), f"what is held grows from sync to sync: {held}, {last}")

    def test_a_failed_stream_leaves_nothing_when_it_is_finalized(self) -> None:
        """What both ends hold after `finalize`, memory and files, is the same whichever end's
        failure was before it, and how often."""
        with self._rollouts(1, MEMORY_BUCKET_BYTES) as rollouts:
            held: list[Held] = []
            for iterator_fails_at, rollouts.loader_fails_at in FAILURES * LIVES:
                rollouts.send_failing(failing_at(iterator_fails_at, large_weights().items()))
                (answer,) = rollouts.answers()
                _expect(answer.error != "", "the receiver took half a stream for a whole one")
                rollouts.finalize()
                held.append(rollouts.held())
                rollouts.connect()
            rollouts.finalize()
            first = held[len(FAILURES) - 1]
            last = settled(rollouts.held, first)
            _expect(last.is_about(first), f"failed streams leave something: {held}, {last}")

    def test_an_empty_stream_is_one(self) -> None:
        """No weights at all are received as such."""
        with self._rollouts(1) as rollouts:
            rollouts.send([])
            (answer,) = rollouts.answers()
            _expect(answer == Received(names=()), f"an empty stream ended as {answer}")

    def test_a_failing_iterator_fails_both_ends_and_the_next_stream_is_clean(self) -> None:
        """The sender raises its iterator's error, the receiver raises too, and both go on."""
        with self._rollouts(1) as rollouts:
            error = rollouts.send_failing(stream_failing_at("three_buckets"))
            _expect("three_buckets" in str(error), f"the sender hides its error: {error!r}")
            (answer,) = rollouts.answers()
            _expect(answer.error != "", "the receiver took half a stream for a whole one")
            rollouts.send(sample_weights().items())
            self._expect_everything(rollouts)

    def test_a_failing_loader_fails_both_ends_and_the_next_stream_is_clean(self) -> None:
        """The receiver raises its loader's error, the sender raises too, and both go on."""
        with self._rollouts(1) as rollouts:
            rollouts.loader_fails_at = "bucket_and_one"
            rollouts.send_failing(sample_weights().items())
            (answer,) = rollouts.answers()
            _expect("LoaderFailed" in answer.error, f"the receiver hides its error: {answer}")
            rollouts.loader_fails_at = ""
            rollouts.send(sample_weights().items())
            self._expect_everything(rollouts)

    def test_a_killed_receiver_is_noticed(self) -> None:
        """The sender raises long before the deadline that it has for the slow."""
        with self._rollouts(1) as rollouts:
            (receiver,) = rollouts.processes

            def weights() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in sample_weights().items():
                    if name == "three_buckets":
                        receiver.kill()
                        receiver.join()
                    yield name, tensor

            rollouts.begin()
            _expect_noticed(rollouts.policy.send_weights(weights()), "a receiver")

    def test_a_killed_sender_is_noticed(self) -> None:
        """The receiver raises long before the deadline that it has for the slow."""
        elsewhere = next(iter(self.environments), {})
        policy = DyingPolicy(self.backend, self.engine_kwargs, elsewhere, "three_buckets")
        rollout = self._engine()
        with policy:
            policy.send_to(rollout)
            try:
                _expect_noticed(_received(rollout), "a sender")
            finally:
                rollout.finalize()

    def test_a_name_that_comes_twice_is_refused(self) -> None:
        """Two tensors of one name are an error of the stream."""
        samples = list(sample_weights().items())
        with self._rollouts(1) as rollouts:
            error = rollouts.send_failing([*samples, samples[0]])
            _expect(samples[0][0] in str(error), f"the error does not name it: {error!r}")
            (answer,) = rollouts.answers()
            _expect(answer.error != "", "the receiver took a damaged stream for a whole one")

    def test_a_worker_that_feeds_nobody_drains_its_iterator(self) -> None:
        """Making the weights may take collectives that every policy worker has to join."""
        policy = [self._engine(), self._engine()]
        rollout = self._engine()
        metadata = [each.prepare() for each in (*policy, rollout)]
        try:
            policy[1].init_policy_process_group(
                worker_rank=1, train_world_size=2, rollout_world_size=1, metadata=metadata
            )
            weights = iter(sample_weights().items())
            asyncio.run(policy[1].send_weights(weights))
            _expect(next(weights, None) is None, "the iterator was not consumed to its end")
        finally:
            for each in (*policy, rollout):
                each.finalize()

    def test_a_second_life_is_as_good_as_the_first(self) -> None:
        """After `finalize`, `prepare` and the rest work again; `finalize` twice is harmless."""
        with self._rollouts(1) as rollouts:
            for _ in range(2):
                rollouts.send(sample_weights().items())
                self._expect_everything(rollouts)
                rollouts.finalize()
                rollouts.finalize()
                rollouts.connect()

    def test_release_after_refit_is_an_option(self) -> None:
        """The synchronizer, whose it is, gives the engine all options."""
        create_checkpoint_engine(
            self.backend,
            bucket_size_bytes=BUCKET_BYTES,
            engine_kwargs={**self.engine_kwargs, "release_after_refit": True},
        ).finalize()

    def test_world_sizes_that_do_not_fit_are_refused(self) -> None:
        """Fewer workers in the metadata than the world sizes say: an error, and no wait."""
        engine = self._engine()
        metadata = [engine.prepare()]
        try:
            engine.init_policy_process_group(
                worker_rank=0, train_world_size=1, rollout_world_size=2, metadata=metadata
            )
        except RefitConfigurationError:
            return
        finally:
            engine.finalize()
        raise AssertionError("world sizes of three were taken with one worker's metadata")

    def _engine(self) -> CheckpointEngine:
        return create_checkpoint_engine(
            self.backend, bucket_size_bytes=BUCKET_BYTES, engine_kwargs=self.engine_kwargs
        )

    def _rollouts(self, count: int, bucket_bytes: int = BUCKET_BYTES) -> Rollouts:
        return Rollouts(self.backend, self.engine_kwargs, count, self.environments, bucket_bytes)

    def _expect_large(self, rollouts: Rollouts) -> None:
        (answer,) = rollouts.answers()
        names = tuple(large_weights())
        _expect(answer == Received(names), f"the rollout did not get what was sent: {answer}")

    def _expect_everything(self, rollouts: Rollouts) -> None:
        for rank, answer in enumerate(rollouts.answers()):
            complete = _in_order(answer.names) == _in_order(sample_weights())
            _expect(
                complete and not answer.error,
                f"rollout {rank} did not get what was sent: {answer}",
            )


class FanOutConformance(EngineConformance):
    """The suite for an engine whose policy worker may feed several rollout workers."""

    def test_one_sender_feeds_two_receivers(self) -> None:
        """Each gets everything, whichever of them is slow."""
        with self._rollouts(2) as rollouts:
            for slow in (0, 1):
                rollouts.slow_rank = slow
                rollouts.send(sample_weights().items())
                self._expect_everything(rollouts)


def _expect_noticed(end: Coroutine[object, object, object], which: str) -> None:
    """Let an end of a stream run whose other end, `which`, is killed."""

    async def in_time() -> bool:
        deadline = asyncio.timeout(NOTICED_S)
        try:
            async with deadline:
                await end
        except Exception:
            return not deadline.expired()
        return False

    _expect(
        asyncio.run(in_time()),
        f"{which} was killed, and the other end did not raise within {NOTICED_S:g} s",
    )


async def _received(rollout: CheckpointEngine) -> None:
    async with aclosing(rollout.receive_weight_batches()) as batches:
        async for _ in batches:
            pass


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _in_order(names: Iterable[str]) -> list[str]:
    """The names with the tied ones, which may come earlier than they are sent, put in front."""
    return sorted(names, key=lambda name: TIED.index(name) if name in TIED else len(TIED))
