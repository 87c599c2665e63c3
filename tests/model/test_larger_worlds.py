"""Worlds too large to exhaust, explored at random: Hypothesis shrinks what breaks a promise."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollsync.pure.rollout import (
    BuiltInSampler,
    InOrderSampler,
    ReadyFirstSampler,
    RecoveryGranularity,
    WeightFifoSampler,
    WindowedSampler,
)
from tests.model.promise import broken_end, broken_promise
from tests.model.world import Config, Machine, Node, edges, initial

windows = st.integers(0, 2)
samplers: st.SearchStrategy[BuiltInSampler] = st.one_of(
    st.builds(WindowedSampler, max_staleness_versions=windows, sample_freshest_first=st.booleans()),
    st.builds(ReadyFirstSampler, max_staleness_versions=windows),
    st.builds(WeightFifoSampler, max_staleness_versions=windows),
    st.builds(InOrderSampler, max_lookahead_versions=windows),
)
configs = st.builds(
    Config,
    sampler=samplers,
    prompts=st.integers(4, 12),
    epoch=st.integers(2, 5),
    siblings=st.integers(1, 3),
    batch=st.integers(1, 4),
    crashes=st.just(6),
    faults=st.integers(0, 6),
    max_failed_attempts=st.integers(1, 2),
    spares=st.integers(0, 2),
    granularity=st.sampled_from(RecoveryGranularity),
)


class LargerWorld(RuleBasedStateMachine):
    """Any edge of the world, in any order; in the end the run is left to finish by itself."""

    config: Config
    node: Node

    @initialize(config=configs)
    def begin(self, config: Config) -> None:
        self.config = config
        self.node = initial(config)

    @rule(choice=st.integers(0, 1000), stir=st.integers(0, 5))
    def something_happens(self, choice: int, stir: int) -> None:
        every = list(edges(self.config, Machine(), self.node))
        # Mostly work, now and then a fault, a save or a crash.
        work = [edge for edge in every if edge.productive]
        offered = every if stir == 0 or not work else work
        if offered:
            self.node = offered[choice % len(offered)].node

    @invariant()
    def the_promise_holds(self) -> None:
        assert broken_promise(self.config, self.node) is None

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        while work := [e for e in edges(self.config, Machine(), self.node) if e.productive]:
            self.node = work[-1].node
            assert broken_promise(self.config, self.node) is None
        assert broken_end(self.config, self.node) is None


TestLargerWorld = LargerWorld.TestCase
TestLargerWorld.settings = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
