"""What the direct way over NIXL registers, tells a receiver of, and gives back."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch

from rollsync.pure.refit.control import ControlBody, ProbeOffered, TensorsOffered
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.nixl_agent import MemoryRegion, NixlAgent, NixlError
from tests.shell.refit.engines.test_direct import Ends, ends, weights

BATCHED = ["version", "norm", "last"]
READ = ["k", "o", "q"]
SYNCS = 20


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[MemoryRegion]:
    """What is registered beside transfer buffers, by all agents of this process, now."""
    now: list[MemoryRegion] = []
    register, deregister = NixlAgent.register_regions, NixlAgent.deregister_regions

    def registering(agent: NixlAgent, regions: Sequence[MemoryRegion]) -> None:
        register(agent, regions)
        now.extend(regions)

    def deregistering(agent: NixlAgent, regions: Sequence[MemoryRegion]) -> None:
        deregister(agent, regions)
        for region in regions:
            now.remove(region)

    monkeypatch.setattr(NixlAgent, "register_regions", registering)
    monkeypatch.setattr(NixlAgent, "deregister_regions", deregistering)
    return now


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages that carried metadata of an agent, until they are cleared."""
    found: list[str] = []
    send = ControlChannel.send

    async def noting(channel: ControlChannel, body: ControlBody) -> bytes:
        if isinstance(body, ProbeOffered | TensorsOffered) and body.agent is not None:
            found.append(type(body).__name__)
        return await send(channel, body)

    monkeypatch.setattr(ControlChannel, "send", noting)
    return found


def check_read(both: Ends, sent: dict[str, torch.Tensor]) -> None:
    assert both.stream(list(sent.items()))[1] == BATCHED
    assert sorted(both.destinations.arrived) == READ
    assert torch.equal(both.fused, torch.cat([sent["q"], sent["k"]]))
    assert torch.equal(both.cut, sent["o"][:, 30:])


def test_memory_is_registered_once_and_told_of_once(
    registered: list[MemoryRegion], told: list[str]
) -> None:
    sent = weights()
    with ends("nixl") as both:
        check_read(both, sent)
        once, known = list(registered), len(told)
        assert sorted(each.size_bytes for each in once) == sorted(
            [16, 16, *(each.nbytes for each in (both.fused, both.cut))]
            + [sent[name].nbytes for name in READ]
        )
        assert known > 1
        for _ in range(2):
            for name in READ:
                sent[name].add_(1.0)
            check_read(both, sent)
        assert registered == once
        assert len(told) == known
    assert not registered


def test_what_is_replaced_is_given_back_and_twenty_syncs_hold_no_more_than_one(
    registered: list[MemoryRegion], told: list[str]
) -> None:
    with ends("nixl") as both:
        held: list[int] = []
        for _ in range(SYNCS):
            sent = weights()
            check_read(both, sent)
            held.append(len(registered))
            gone = [weakref.ref(each) for each in sent.values()]
            del sent
            gc.collect()
            assert not any(each() for each in gone)
        assert len(set(held)) == 1
        assert told.count("ProbeOffered") == SYNCS


def test_weights_that_do_not_last_come_through_buckets(registered: list[MemoryRegion]) -> None:
    def made_anew(sent: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in sent.items():
            yield name, tensor.clone()

    with ends("nixl") as both:
        for count in range(3):
            sent = weights()
            names = both.stream(made_anew(sent))[1]
            assert isinstance(names, list)
            if count:
                assert names == list(sent)
                # The probes of both ends, and the parameters.
                assert len(registered) == 4
            both.fused.zero_()
        lasting = weights()
        assert both.stream(list(lasting.items()))[1] == list(lasting)
        check_read(both, lasting)


def test_after_a_declined_plan_everything_is_told_again(told: list[str]) -> None:
    sent = weights()
    with ends("nixl") as both:
        check_read(both, sent)
        kept, both.destinations = both.destinations, None  # type: ignore[assignment]
        assert both.stream(list(sent.items()))[1] == list(sent)
        both.destinations = kept
        told.clear()
        check_read(both, sent)
        assert told == ["ProbeOffered"]


def test_parameters_that_were_replaced_are_registered_anew(registered: list[MemoryRegion]) -> None:
    sent = weights()
    with ends("nixl") as both:
        check_read(both, sent)
        before = len(registered)
        both.replace_parameters()
        check_read(both, sent)
        check_read(both, sent)
        assert len(registered) == before


def test_memory_that_cannot_be_registered_comes_through_buckets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register = NixlAgent.register_regions
    refused: list[int] = []

    def refusing(agent: NixlAgent, regions: Sequence[MemoryRegion]) -> None:
        if any(region.address in refused for region in regions):
            raise NixlError("no memory may be locked")
        register(agent, regions)

    monkeypatch.setattr(NixlAgent, "register_regions", refusing)
    sent = weights()
    with ends("nixl") as both, caplog.at_level(logging.WARNING):
        # A tensor that cannot be read is sent alone.
        refused[:] = [sent["o"].data_ptr()]
        assert both.stream(list(sent.items()))[1] == ["version", "norm", "o", "last"]
        # When a parameter cannot be read into, everything is sent.
        both.replace_parameters()
        refused[:] = [both.cut.data_ptr()]
        assert both.stream(list(sent.items()))[1] == list(sent)
    assert caplog.text.count("no memory may be locked") == 2
