"""What the workers of a chain agree on: what is declared, what is kept, who sends, and how."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.layout import Box, Part, part_name
from rollsync.shell.refit.engines.conformance_workers import sample_weights
from rollsync.shell.refit.engines.errors import PeerFailed, TransferError
from rollsync.shell.refit.engines.metadata import HOST_LABEL
from rollsync.shell.refit.engines.nixl import NixlCheckpointEngine
from rollsync.shell.refit.errors import RefitConfigurationError
from tests.shell.refit.engines.chains import Chain, Order, Outcome
from tests.shell.refit.engines.pairs import BUCKET_BYTES, spec_of
from tests.shell.refit.engines.peers import receive_all

DECLARED = tuple(spec_of(name, tensor) for name, tensor in sample_weights().items())
SPECS = {spec.name: spec for spec in DECLARED}
NAMES = sorted(SPECS)


def upper(rows: int) -> tuple[Part, ...]:
    """A layout of the first rows of a matrix larger than a ring, and some whole tensors."""
    cut = SPECS["three_buckets_transposed"]
    boxes = {cut.name: Box((0, 0), (rows, cut.shape[1])), "boolean": Box((0,), (3,))}
    return tuple(Part(name, box) for name, box in boxes.items())


def parts_of(layout: tuple[Part, ...]) -> list[str]:
    return sorted(part_name(part.name, SPECS[part.name], part.box) for part in layout)


@pytest.fixture(scope="module")
def chain() -> Iterator[Chain]:
    with Chain() as chain:
        yield chain


def stream(
    chain: Chain,
    *,
    declared: tuple[tuple[TensorSpec, ...] | None, ...] = (DECLARED,) * 4,
    layouts: tuple[tuple[Part, ...] | None, ...] = (None,) * 3,
) -> list[Outcome]:
    """One stream, with what the members declare and the rollout workers keep."""
    orders = [
        Order(declared=one, layout=two) for one, two in zip(declared, (None, *layouts), strict=True)
    ]
    return chain.stream(dict(enumerate(orders)))


def test_workers_of_one_layout_are_sent_only_that(chain: Chain) -> None:
    for rows in (20, 20, 33):
        policy, *rollouts = stream(chain, layouts=(upper(rows),) * 3)
        assert policy.error == ""
        for outcome in rollouts:
            assert (outcome.names, outcome.error) == (parts_of(upper(rows)), "")


@pytest.mark.parametrize("different", range(3))
def test_workers_of_different_layouts_are_sent_whole_tensors(chain: Chain, different: int) -> None:
    for other in (upper(10), None):
        layouts = tuple(other if rank == different else upper(20) for rank in range(3))
        policy, *rollouts = stream(chain, layouts=layouts)
        assert policy.error == ""
        for rank, outcome in enumerate(rollouts):
            # The last two are alike when the first is not, and no two of them ask for more.
            assert (outcome.names, outcome.error) == (NAMES, ""), rank


@pytest.mark.parametrize("different", [0, 1, 3])
@pytest.mark.parametrize("others", [DECLARED, None])
def test_another_declaration_is_found_wherever_it_is(
    chain: Chain, different: int, others: tuple[TensorSpec, ...] | None
) -> None:
    odd = (*DECLARED[:3], TensorSpec(DECLARED[3].name, (99,), "float32"), *DECLARED[4:])
    declared = tuple(
        odd if member == different else DECLARED if member == 0 else others for member in range(4)
    )
    outcomes = stream(chain, declared=declared)
    if different == 0 and others is None:
        # Only the policy has declared anything, and what it sends is something else.
        assert outcomes[0].kind == "WeightMismatch"
    else:
        assert "WeightMismatch" in {outcome.kind for outcome in outcomes}
    for outcome in outcomes:
        assert DECLARED[3].name in outcome.error, outcome
    assert all(outcome.error == "" for outcome in stream(chain))


@pytest.mark.parametrize(
    "stuck", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_the_neighbour_of_a_stuck_worker_says_who_it_is(stuck: int) -> None:
    with Chain(timeout_s=2.0) as chain:
        outcomes = chain.stream({stuck: Order(stick=("bucket", 5.0))})
        for member, outcome in enumerate(outcomes):
            if member == 0 and stuck == 1:
                assert outcome.kind == "TransferTimeout"
            elif member != stuck:
                # Not a failure of its own, as whoever looks for an engine to blame has to know.
                assert outcome.kind == "PeerFailed"
            if member != stuck:
                assert f"rollout {stuck - 1} said nothing for" in outcome.error
        assert outcomes[stuck].error


MIXED = ("p", "a", "a", "b", "p")


def test_auto_relays_within_a_host_too() -> None:
    with Chain(MIXED, backend="auto") as chain:
        assert [choice.partition(":")[0] for choice in chain.choices()] == [
            "policy 0 to rollout 0 by nixl",
            "rollout 0 to rollout 1 by shm",
            "rollout 0 to rollout 2 by nixl",
            "policy 0 to rollout 3 by shm",
        ]
        for dying in (1, 2, 4):
            for _ in range(2):
                policy, *rollouts = chain.stream()
                assert policy.error == ""
                assert [outcome.names for outcome in rollouts] == [NAMES] * 4
            outcomes = chain.stream({dying: Order(die="loads three_buckets")})
            assert outcomes[dying].died
            for member, outcome in enumerate(outcomes):
                assert member == dying or f"rollout {dying - 1}" in outcome.error
            chain.connect()
        assert chain.finalize() == [None] * len(MIXED)


@contextmanager
def prepared(
    monkeypatch: pytest.MonkeyPatch, *relay: bool
) -> Iterator[tuple[list[NixlCheckpointEngine], list[object]]]:
    """Engines of this process, each on a host of its own, and their metadata."""
    engines = [
        NixlCheckpointEngine(BUCKET_BYTES, refit_timeout_s=1.0, relay=each) for each in relay
    ]
    metadata: list[object] = []
    for index, engine in enumerate(engines):
        monkeypatch.setenv(HOST_LABEL, f"host {index}")
        metadata.append(engine.prepare())
    yield engines, metadata
    for engine in engines:
        engine.finalize()


def test_relays_are_for_all_workers_or_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = pytest.raises(RefitConfigurationError, match="worker 1 of the metadata has relay: F")
    with prepared(monkeypatch, True, False) as (engines, metadata), refused:
        engines[0].init_policy_process_group(
            worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=metadata
        )


def test_another_runs_relay_does_not_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async def all_of_them(engines: list[NixlCheckpointEngine]) -> list[object]:
        return list(
            await asyncio.gather(
                engines[0].send_weights(sample_weights().items()),
                *(receive_all(each) for each in engines[1:]),
                return_exceptions=True,
            )
        )

    worlds = {"train_world_size": 1, "rollout_world_size": 2}
    with prepared(monkeypatch, True, True, True) as (engines, metadata):
        policy, relay, last = engines
        policy.init_policy_process_group(worker_rank=0, metadata=metadata, **worlds)
        last.init_rollout_process_group(rollout_rank=1, metadata=metadata, **worlds)
        known = metadata[2]
        assert isinstance(known, dict)
        foreign: list[object] = [*metadata[:2], {**known, "secret": os.urandom(32).hex()}]
        relay.init_rollout_process_group(rollout_rank=0, metadata=foreign, **worlds)
        errors = asyncio.run(all_of_them(engines))
        assert all(isinstance(error, TransferError) for error in errors), errors
        assert isinstance(errors[0], PeerFailed)
        assert "rollout 0 failed while it connected: PeerLost: " in str(errors[0])
