"""Rollout workers that relay: chains over NIXL between hosts, as far as the engines can tell.

The deadline is far longer than a test may take, so who gives up in time was told, or has noticed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollsync.shell.refit.engines.conformance_workers import TIED, sample_weights
from tests.shell.refit.engines.chains import Chain, Order, Outcome
from tests.shell.refit.engines.moments import BEFORE_IT

NAMES = sorted(sample_weights())
POLICY, FIRST, SECOND, LAST = range(4)
MEMBERS = ("policy 0", "rollout 0", "rollout 1", "rollout 2")


@pytest.fixture(scope="module")
def chain() -> Iterator[Chain]:
    """A chain that outlives its members, and at its end leaves nothing."""
    with Chain() as chain:
        yield chain
        chain.connect()
        assert chain.finalize() == [None] * len(MEMBERS)


def expect_everything(outcomes: list[Outcome]) -> None:
    policy, *rollouts = outcomes
    assert policy == Outcome()
    for outcome in rollouts:
        assert (outcome.names, outcome.error) == (NAMES, "")


def expect_next(chain: Chain) -> None:
    """The next stream is as good as the first."""
    chain.connect()
    expect_everything(chain.stream())


def test_the_policy_worker_says_where_its_weights_go(chain: Chain) -> None:
    assert [choice.partition(":")[0] for choice in chain.choices()] == [
        "policy 0 to rollout 0 by nixl",
        "rollout 0 to rollout 1 by nixl",
        "rollout 1 to rollout 2 by nixl",
    ]


def test_everything_arrives_stream_after_stream(chain: Chain) -> None:
    for _ in range(3):
        outcomes = chain.stream()
        expect_everything(outcomes)
        for outcome in outcomes[1:]:
            ties = [name for name in outcome.came if name in TIED[:2]]
            assert ties == ["near.first", "near.second"]


@pytest.mark.parametrize("slow", [FIRST, SECOND, LAST])
def test_a_slow_worker_slows_the_chain_and_stops_nobody(chain: Chain, slow: int) -> None:
    stick = Order(stick=("bucket", 0.3))
    expect_everything(chain.stream({slow: stick}))


@pytest.mark.parametrize("failing", range(4))
def test_everybody_is_told_who_failed_and_at_what(chain: Chain, failing: int) -> None:
    outcomes = chain.stream({failing: Order(fail="three_buckets")})
    assert outcomes[failing].kind == "MemberFailed"
    stage = "made the weights" if failing == POLICY else "loaded"
    for member in set(range(4)) - {failing}:
        assert outcomes[member].kind == "PeerFailed"
        assert f"{MEMBERS[failing]} failed while it {stage}" in outcomes[member].error
        assert "MemberFailed: no three_buckets" in outcomes[member].error
    # On the connections that are there.
    expect_everything(chain.stream())


DEATHS = {
    POLICY: (
        BEFORE_IT,
        "sent Hello",
        "hands over",
        "sends StreamBegins",
        "makes three_buckets",
        "sent BucketFilled",
        "sends StreamEnded",
    ),
    FIRST: (
        BEFORE_IT,
        "accepts",
        "connects",
        "sent Hello",
        "hands over",
        "sends PlanAnswered",
        "sends StreamBegins",
        "fetches",
        "sends BucketFilled",
        "loads three_bf16",
        "received BucketReleased",
        "sends BucketReleased",
        "sends StreamEnded",
        "received StreamAccepted",
        "sends StreamAccepted",
    ),
    LAST: (
        BEFORE_IT,
        "sent Welcome",
        "takes over",
        "fetches",
        "loads three_buckets",
        "sends BucketReleased",
        "sends StreamAccepted",
    ),
}
DEATHS[SECOND] = DEATHS[FIRST]
QUICK = {
    (POLICY, "sent BucketFilled"),
    (FIRST, "fetches"),
    (SECOND, BEFORE_IT),
    (SECOND, "received BucketReleased"),
    (LAST, "loads three_buckets"),
}


@pytest.mark.parametrize(
    ("dying", "moment"),
    [
        pytest.param(member, moment, marks=[] if (member, moment) in QUICK else [pytest.mark.slow])
        for member, moments in DEATHS.items()
        for moment in moments
    ],
)
def test_a_killed_worker_is_noticed_by_all_and_the_next_stream_is_whole(
    chain: Chain, dying: int, moment: str
) -> None:
    if moment == "hands over":
        # Buffers that are known are not handed over again.
        chain.finalize()
        chain.connect()
    outcomes = chain.stream({dying: Order(die=moment)})
    assert [outcome.died for outcome in outcomes] == [each == dying for each in range(4)]
    for member, outcome in enumerate(outcomes):
        if member > dying and (outcome.names, outcome.error) == (NAMES, ""):
            # It had accepted everything; its sync has failed nevertheless, as the policy knows.
            assert outcomes[POLICY].died or outcomes[POLICY].error
        elif member != dying:
            assert outcome.is_transfer, outcome
            assert MEMBERS[dying] in outcome.error
    expect_next(chain)
