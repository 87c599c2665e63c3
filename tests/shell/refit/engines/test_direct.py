"""Tensors that a receiver reads straight into its parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import aclosing, contextmanager

import pytest
import torch

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.control import Destination
from rollsync.pure.refit.direct import destinations_of
from rollsync.pure.refit.load_plan import Copy, Region, SeenParameter, SeenTensor, plan_load
from rollsync.shell.refit.engines import CheckpointEngine, create_checkpoint_engine
from rollsync.shell.refit.engines.direct import Destinations, DirectEngine
from rollsync.shell.refit.engines.direct_sending import DirectSender
from rollsync.shell.refit.engines.errors import PeerFailed, PeerRefused, StreamError
from rollsync.shell.refit.engines.metadata import HOST_LABEL
from rollsync.shell.refit.engines.staged import StagedEngine

BUCKET_BYTES = 4096
BACKENDS = ["shm", "nixl", "auto"]


class Ends:
    """One policy and one rollout engine in this process, and the rollout's parameters."""

    def __init__(self, backend: str, checksum: bool, large_pages: bool) -> None:
        options = {
            "direct": True,
            "checksum": checksum,
            "large_pages": large_pages,
            "refit_timeout_s": 20.0,
        }
        made = [
            create_checkpoint_engine(backend, bucket_size_bytes=BUCKET_BYTES, engine_kwargs=options)
            for _ in range(2)
        ]
        self.engines = [each for each in made if isinstance(each, StagedEngine)]
        metadata = [engine.prepare() for engine in self.engines]
        worlds = {"train_world_size": 1, "rollout_world_size": 1}
        self.engines[0].init_policy_process_group(worker_rank=0, metadata=metadata, **worlds)
        self.engines[1].init_rollout_process_group(rollout_rank=0, metadata=metadata, **worlds)
        self.replace_parameters()

    def replace_parameters(self) -> None:
        """Make the rollout's parameters anew."""
        self.fused = torch.zeros(8, 600)
        self.cut = torch.zeros(40, 30)
        self.destinations = self._destinations()

    def _destinations(self) -> Destinations:
        half = 4 * 600 * 4
        copies = {
            "q": ((4, 600), Copy(Region(0, half), "fused", Region(0, half))),
            "k": ((4, 600), Copy(Region(0, half), "fused", Region(half, half))),
            "o": ((40, 60), Copy(Region(120, 120, 40, 240), "cut", Region(0, 4800))),
        }
        plan = plan_load(
            {
                name: SeenTensor(TensorSpec(name, shape, "float32"), (copy,))
                for name, (shape, copy) in copies.items()
            },
            {"fused": SeenParameter("a", 2 * half), "cut": SeenParameter("b", 4800)},
        )
        wanted = destinations_of(plan)
        assert [each.name for each in wanted] == ["q", "k", "o"]
        return Destinations(
            wanted,
            {name: each.copies for name, each in plan.direct.items()},
            {"fused": self.fused, "cut": self.cut},
        )

    def stream(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[object]:
        """What the sender and the receiver say: None, or names, or an error."""
        self.engines[1].read_into(self.destinations)

        async def both() -> list[object]:
            return list(
                await asyncio.gather(
                    self.engines[0].send_weights(iter(weights)),
                    names_of(self.engines[1]),
                    return_exceptions=True,
                )
            )

        return asyncio.run(both())


async def names_of(engine: CheckpointEngine) -> list[str]:
    """The names that come in batches."""
    names: list[str] = []
    async with aclosing(engine.receive_weight_batches()) as batches:
        async for batch in batches:
            names += [name for name, _ in batch]
    return names


@contextmanager
def ends(backend: str, *, checksum: bool = True, large_pages: bool = True) -> Iterator[Ends]:
    made = Ends(backend, checksum, large_pages)
    yield made
    for engine in made.engines:
        engine.finalize()


def weights() -> dict[str, torch.Tensor]:
    return {
        "version": torch.tensor(3),
        "q": torch.randn(4, 600),
        "norm": torch.randn(7),
        "k": torch.randn(4, 600),
        "o": torch.randn(40, 60),
        "last": torch.randn(3000),
    }


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("checksum", [True, False])
def test_what_is_known_is_read_and_the_rest_is_handed_out(backend: str, checksum: bool) -> None:
    with ends(backend, checksum=checksum) as both:
        for _ in range(3):
            sent = weights()
            _, names = both.stream(list(sent.items()))
            assert names == ["version", "norm", "last"]
            assert sorted(both.destinations.arrived) == ["k", "o", "q"]
            assert torch.equal(both.fused, torch.cat([sent["q"], sent["k"]]))
            assert torch.equal(both.cut, sent["o"][:, 30:])


def test_one_sender_is_read_from_both_ways_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, object] = {"direct": True, "refit_timeout_s": 20.0}
    here, near, far = (
        create_checkpoint_engine("auto", bucket_size_bytes=BUCKET_BYTES, engine_kwargs=options)
        for _ in range(3)
    )
    metadata = [here.prepare(), near.prepare()]
    monkeypatch.setenv(HOST_LABEL, "elsewhere")
    metadata.append(far.prepare())
    worlds = {"train_world_size": 1, "rollout_world_size": 2}
    here.init_policy_process_group(worker_rank=0, metadata=metadata, **worlds)
    parameters = [torch.zeros(4, 600) for _ in (near, far)]
    for rank, (engine, parameter) in enumerate(zip((near, far), parameters, strict=True)):
        engine.init_rollout_process_group(rollout_rank=rank, metadata=metadata, **worlds)
        assert isinstance(engine, DirectEngine)
        whole = Region(0, parameter.nbytes)
        wanted = Destination(name="q", shape=(4, 600), dtype="float32", regions=(whole,))
        engine.read_into(Destinations([wanted], {"q": [Copy(whole, "p", whole)]}, {"p": parameter}))

    async def all_ends(sent: dict[str, torch.Tensor]) -> list[object]:
        return list(
            await asyncio.gather(
                here.send_weights(iter(sent.items())), *(names_of(each) for each in (near, far))
            )
        )

    for _ in range(2):
        sent = weights()
        assert asyncio.run(all_ends(sent))[1:] == [[name for name in sent if name != "q"]] * 2
        assert all(torch.equal(each, sent["q"]) for each in parameters)
    for engine in (here, near, far):
        engine.finalize()


def test_a_tensor_of_another_form_goes_through_the_buckets(backend: str) -> None:
    with ends(backend) as both:
        sent = {**weights(), "q": torch.randn(600, 4).t(), "k": torch.randn(4, 600).double()}
        _, names = both.stream(list(sent.items()))
        assert names == ["version", "q", "norm", "k", "last"]
        assert list(both.destinations.arrived) == ["o"]


def test_without_destinations_everything_is_handed_out(backend: str) -> None:
    with ends(backend) as both:
        both.engines[1].read_into(None)
        kept, both.destinations = both.destinations, None  # type: ignore[assignment]
        sent = weights()
        assert both.stream(list(sent.items()))[1] == list(sent)
        both.destinations = kept
        assert both.stream(list(sent.items()))[1] == ["version", "norm", "last"]


def test_a_stream_does_not_end_without_a_late_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> None:
        pass

    with ends("shm") as both:
        both.stream(list(weights().items()))
        monkeypatch.setattr(DirectSender, "_send_checksums", nothing)
        monkeypatch.setattr(DirectSender, "end", nothing)
        sender, receiver = both.stream([("q", torch.randn(4, 600))])
        assert isinstance(sender, PeerFailed)
        assert isinstance(receiver, PeerRefused)
        assert "no checksum" in str(receiver)


def test_memory_that_an_iterator_uses_again_is_an_error_of_both_ends(backend: str) -> None:
    with ends(backend) as both:
        one = torch.randn(4, 600)
        sender, receiver = both.stream([("q", one), ("k", one)])
        assert isinstance(sender, StreamError)
        assert isinstance(receiver, PeerFailed)
        assert both.stream(list(weights().items()))[1] == ["version", "norm", "last"]
