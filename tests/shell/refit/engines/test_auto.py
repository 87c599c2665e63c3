"""What the `auto` engine chooses for each route, and what it reserves for that."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollsync.shell.refit.engines.auto import AutoCheckpointEngine
from rollsync.shell.refit.engines.conformance_workers import Rollouts, sample_weights
from rollsync.shell.refit.engines.errors import PeerLost
from rollsync.shell.refit.engines.metadata import HOST_LABEL, host_identity
from rollsync.shell.refit.engines.nixl_agent import NixlAgent
from rollsync.shell.refit.engines.packing import StreamPacker

ELSEWHERE = {HOST_LABEL: "elsewhere"}


@contextmanager
def one_of_three_elsewhere() -> Iterator[tuple[Rollouts, AutoCheckpointEngine]]:
    """One policy worker, and three rollout workers of which the second is on another host."""
    with Rollouts("auto", {}, 3, [{}, ELSEWHERE]) as rollouts:
        assert isinstance(rollouts.policy, AutoCheckpointEngine)
        yield rollouts, rollouts.policy


def send_everything(rollouts: Rollouts) -> None:
    rollouts.send(sample_weights().items())
    for answer in rollouts.answers():
        assert (sorted(answer.names), answer.error) == (sorted(sample_weights()), "")


def carriers(rollouts: Rollouts) -> list[str]:
    assert isinstance(rollouts.policy, AutoCheckpointEngine)
    return [choice.engine for choice in rollouts.policy.choices]


def test_a_label_tells_hosts_apart_and_never_joins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_LABEL, raising=False)
    found = host_identity()
    monkeypatch.setenv(HOST_LABEL, "rack 7")
    assert host_identity() == f"{found}/rack 7"


def test_each_route_is_carried_as_its_ends_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_LABEL, raising=False)
    here = host_identity()
    with one_of_three_elsewhere() as (_, policy):
        assert [str(choice) for choice in policy.choices] == [
            f"policy 0 to rollout 0 by shm: both are on host {here}",
            f"policy 0 to rollout 1 by nixl: the sender is on host {here}, the receiver on"
            f" {here}/elsewhere",
            f"policy 0 to rollout 2 by shm: both are on host {here}",
        ]
    assert policy.choices == ()


def test_a_bucket_that_goes_both_ways_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packers: list[StreamPacker] = []
    make = StreamPacker.__init__

    def counted(packer: StreamPacker, bucket_bytes: int) -> None:
        packers.append(packer)
        make(packer, bucket_bytes)

    monkeypatch.setattr(StreamPacker, "__init__", counted)
    with one_of_three_elsewhere() as (rollouts, _):
        for count in (1, 2):
            send_everything(rollouts)
            assert len(packers) == count


def test_nixl_is_not_needed_within_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("NIXL was started")

    monkeypatch.setattr(NixlAgent, "__init__", refuse)
    with Rollouts("auto", {}, 2) as rollouts:
        send_everything(rollouts)
        assert carriers(rollouts) == ["shm", "shm"]


def test_workers_that_lie_otherwise_after_a_reconnection_are_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same engines, set up anew without a `finalize` in between."""
    with Rollouts("auto", {}, 1) as rollouts:
        for label, carrier in (("", "shm"), ("moved", "nixl"), ("moved", "nixl"), ("", "shm")):
            monkeypatch.setenv(HOST_LABEL, label)
            rollouts.connect()
            send_everything(rollouts)
            assert carriers(rollouts) == [carrier]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_receiver_killed_on_either_way_fails_the_stream_of_all(rank: int) -> None:
    with one_of_three_elsewhere() as (rollouts, _):
        send_everything(rollouts)
        rollouts.begin()
        rollouts.processes[rank].kill()
        rollouts.processes[rank].join()
        with pytest.raises(PeerLost, match=f"rollout {rank}"):
            asyncio.run(rollouts.policy.send_weights(sample_weights().items()))
        for other in {0, 1, 2} - {rank}:
            assert rollouts.answer_of(other).error
