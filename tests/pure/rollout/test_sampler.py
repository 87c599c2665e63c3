"""The four staleness policies: admission, selection, eviction, capacity, and drops."""

from __future__ import annotations

from msgspec.structs import replace
from rpds import HashTrieMap

from rollsync.pure.rollout.decisions import (
    AdmitBatch,
    DrawReserve,
    NothingLeft,
    NothingToAdmit,
    PullPrompts,
    SamplerLimits,
    SkipStep,
    TrainBatch,
    Wait,
    WaitReason,
)
from rollsync.pure.rollout.drops import drop_group, next_stale_drop
from rollsync.pure.rollout.events import FinalizationStarted, ReserveDrawn
from rollsync.pure.rollout.sampler import (
    BuiltInSampler,
    InOrderSampler,
    PromptGroupSampler,
    ReadyFirstSampler,
    WeightFifoSampler,
    WindowedSampler,
    batches_unaccounted,
)
from rollsync.pure.rollout.state import DropReason, RecoveryGranularity, RolloutState
from tests.pure.rollout.events_kit import (
    admit,
    admitted,
    after,
    fresh,
    generate,
    made_ready,
    reserve,
    spare,
    train,
)

ALL: tuple[BuiltInSampler, ...] = (
    WindowedSampler(),
    ReadyFirstSampler(),
    WeightFifoSampler(),
    InOrderSampler(),
)


def limits(
    *, batch: int = 2, capacity: int | None = None, prompts_left: bool = True, served: int = 0
) -> SamplerLimits:
    return SamplerLimits(
        num_prompts_per_step=batch,
        num_generations_per_prompt=2,
        granularity=RecoveryGranularity.SIBLING,
        buffer_capacity=capacity,
        prompts_left=prompts_left,
        served_weight_version=served,
    )


def two_batches(*, stamped: bool = False) -> RolloutState:
    """Batches of prompts 0, 1 and 2, 3 admitted at weight version 0."""
    state = after(fresh(stamped=stamped), reserve(0, 1, 2, 3))
    state = after(state, admit(state, 0, 1))
    return after(state, admit(state, 2, 3))


def taken(answer: object) -> tuple[str, ...]:
    assert isinstance(answer, TrainBatch), answer
    return answer.event.group_ids


def test_a_batch_is_pulled_then_admitted_in_hand_out_order() -> None:
    sampler = ReadyFirstSampler()
    state = fresh()
    assert sampler.admit(state, limits()) == PullPrompts(count=2)
    state = after(state, reserve(0))
    assert sampler.admit(state, limits()) == PullPrompts(count=1)
    state = after(state, reserve(1, 2))
    answer = sampler.admit(state, limits())
    assert isinstance(answer, AdmitBatch)
    assert answer.event.group_ids == ("e0p0", "e0p1")
    assert answer.event.shortfall == 0
    assert after(state, answer.event).sampler_dispatch_index == 0


def test_gated_policies_stop_at_their_lookahead() -> None:
    for sampler in (ReadyFirstSampler(), WeightFifoSampler(), InOrderSampler()):
        state = two_batches(stamped=sampler.stamps_target_steps)
        assert sampler.admit(state, limits()) == Wait(reason=WaitReason.LOOKAHEAD)
        state = made_ready(state, "e0p0", "e0p1")
        state = after(state, *train(state, "e0p0", "e0p1"))
        assert sampler.admit(state, limits()) == PullPrompts(count=2)
    assert WindowedSampler().admit(two_batches(), limits()) == PullPrompts(count=2)


def test_zero_lookahead_admits_the_first_batch_and_is_on_policy() -> None:
    for sampler in (
        ReadyFirstSampler(max_staleness_versions=0),
        WeightFifoSampler(max_staleness_versions=0),
        InOrderSampler(max_lookahead_versions=0),
    ):
        assert sampler.is_on_policy
        assert sampler.admit(fresh(), limits()) == PullPrompts(count=2)
        state = admitted(0, 1, stamped=sampler.stamps_target_steps)
        assert sampler.admit(state, limits()) == Wait(reason=WaitReason.LOOKAHEAD)


def test_the_buffer_s_capacity_holds_admission_back() -> None:
    sampler = WindowedSampler()
    state = made_ready(two_batches(), "e0p0")
    assert sampler.admit(state, limits(capacity=5)) == Wait(reason=WaitReason.CAPACITY)
    assert sampler.admit(state, limits(capacity=6)) == PullPrompts(count=2)


def test_required_capacity_leaves_room_for_progress() -> None:
    assert WindowedSampler().required_buffer_capacity(4) == 7
    assert InOrderSampler(max_lookahead_versions=2).required_buffer_capacity(4) == 12


def test_data_that_does_not_fill_the_last_batch_makes_it_short() -> None:
    ended = limits(prompts_left=False)
    state = after(fresh(), reserve(0))
    answer = ReadyFirstSampler().admit(state, ended)
    assert isinstance(answer, AdmitBatch)
    assert answer.event.shortfall == 1
    state = made_ready(after(state, answer.event), "e0p0")
    assert taken(ReadyFirstSampler().select(state, ended)) == ("e0p0",)
    state = after(state, *train(state, "e0p0"))
    assert ReadyFirstSampler().admit(state, ended) == NothingToAdmit()
    assert ReadyFirstSampler().select(state, ended) == NothingLeft()


def test_spares_are_drawn_when_the_data_ends() -> None:
    state = after(fresh(), reserve(0), spare(1, 2))
    answer = InOrderSampler().admit(state, limits(prompts_left=False))
    drawn = ReserveDrawn(count=1, granularity=RecoveryGranularity.SIBLING, expected_generations=2)
    assert answer == DrawReserve(event=drawn)


def test_nobody_selects_while_a_step_is_open() -> None:
    for sampler in ALL:
        state = made_ready(admitted(0, 1, stamped=sampler.stamps_target_steps), "e0p0", "e0p1")
        answer = sampler.select(state, limits())
        assert isinstance(answer, TrainBatch)
        state = after(state, answer.event)
        assert sampler.select(state, limits()) == Wait(reason=WaitReason.STEP_OPEN)


def test_ready_first_takes_whatever_was_committed_first() -> None:
    state = made_ready(two_batches(), "e0p3", "e0p0", "e0p2")
    assert taken(ReadyFirstSampler().select(state, limits())) == ("e0p3", "e0p0")


def test_in_order_waits_for_its_own_batch() -> None:
    state = made_ready(two_batches(stamped=True), "e0p2", "e0p3", "e0p1")
    assert InOrderSampler().select(state, limits()) == Wait(reason=WaitReason.UNFINISHED)
    state = made_ready(state, "e0p0")
    assert taken(InOrderSampler().select(state, limits())) == ("e0p0", "e0p1")


def test_weight_fifo_does_not_let_young_groups_overtake() -> None:
    sampler = WeightFifoSampler()
    state = made_ready(two_batches(), "e0p0", "e0p1")
    state = after(state, *train(state, "e0p0", "e0p1"), reserve(4, 5))
    state = made_ready(after(state, admit(state, 4, 5)), "e0p4", "e0p5", "e0p2")
    assert sampler.select(state, limits()) == Wait(reason=WaitReason.UNFINISHED)
    state = made_ready(state, "e0p3")
    assert taken(sampler.select(state, limits())) == ("e0p2", "e0p3")


def test_windowed_takes_any_group_in_the_window() -> None:
    state = made_ready(two_batches(), "e0p3", "e0p0")
    state = after(state, *train(state, "e0p3", "e0p0"), reserve(4))
    state = made_ready(after(state, admit(state, 4)), "e0p1", "e0p4", "e0p2")
    assert taken(WindowedSampler().select(state, limits())) == ("e0p1", "e0p4")
    freshest = WindowedSampler(sample_freshest_first=True)
    assert taken(freshest.select(state, limits())) == ("e0p4", "e0p1")
    narrow = WindowedSampler(max_staleness_versions=0)
    assert narrow.select(state, limits()) == Wait(reason=WaitReason.UNFINISHED)
    assert narrow.evict(state) == ("e0p1", "e0p2")


def test_windowed_trains_the_rest_when_nothing_more_comes() -> None:
    state = made_ready(admitted(0), "e0p0")
    sampler = WindowedSampler()
    assert sampler.select(state, limits()) == Wait(reason=WaitReason.UNFINISHED)
    assert taken(sampler.select(state, limits(prompts_left=False))) == ("e0p0",)


def test_stale_groups_are_dropped_one_by_one_but_not_while_finalizing() -> None:
    sampler = WindowedSampler(max_staleness_versions=0)
    state = made_ready(two_batches(), "e0p0", "e0p1")
    state = after(state, *generate("e0p2"), FinalizationStarted(group_id="e0p2"))
    state = after(state, *train(state, "e0p0"))
    dropped: list[str] = []
    while (event := next_stale_drop(sampler, state, limits(served=1))) is not None:
        dropped.append(event.group_id)
        state = after(state, event)
    assert dropped == ["e0p1", "e0p3"]
    assert set(state.ledger.groups) == {"e0p2"}


def test_nothing_starts_or_is_dropped_on_weights_that_are_too_old_already() -> None:
    for sampler in (
        WindowedSampler(max_staleness_versions=0),
        WeightFifoSampler(max_staleness_versions=0),
    ):
        state = made_ready(admitted(0, 1), "e0p0", "e0p1")
        state = after(state, *train(state, "e0p0", "e0p1"), reserve(2, 3))
        assert sampler.admit(state, limits(served=0)) == Wait(reason=WaitReason.WEIGHTS)
        assert isinstance(sampler.admit(state, limits(served=1)), AdmitBatch)
        state = after(state, admit(state, 2, 3, version=0))
        assert next_stale_drop(sampler, state, limits(served=0)) is None
        assert next_stale_drop(sampler, state, limits(served=1)) is not None


def test_a_batch_of_which_everything_is_dropped_is_skipped() -> None:
    for sampler in (ReadyFirstSampler(), WeightFifoSampler(), InOrderSampler()):
        state = admitted(0, 1, stamped=sampler.stamps_target_steps)
        for name in ("e0p0", "e0p1"):
            assert batches_unaccounted(sampler, state, num_prompts_per_step=2) == 0
            state = after(
                state,
                drop_group(sampler, state, name, reason=DropReason.UNRECOVERABLE, limits=limits()),
            )
        assert batches_unaccounted(sampler, state, num_prompts_per_step=2) == 0
        answer = sampler.select(state, limits())
        assert isinstance(answer, SkipStep)
        assert answer.event.group_ids == ()
        state = after(state, *train(state))
        assert state.progress.train_steps == 1
        assert sampler.admit(state, limits()) == PullPrompts(count=2)


def test_a_straggler_dropped_after_its_step_shrinks_the_next_one() -> None:
    sampler = ReadyFirstSampler()
    state = made_ready(two_batches(), "e0p2", "e0p3", "e0p1")
    state = after(state, *train(state, "e0p2", "e0p3"))
    event = drop_group(
        sampler, state, "e0p0", reason=DropReason.UNRECOVERABLE, limits=limits(served=1)
    )
    assert event.shortfall_step == 1
    state = after(state, event)
    assert taken(sampler.select(state, limits())) == ("e0p1",)


def test_another_batch_size_than_the_saved_one_is_noticed() -> None:
    state = two_batches(stamped=True)
    assert batches_unaccounted(InOrderSampler(), state, num_prompts_per_step=3) == -2
    assert batches_unaccounted(WindowedSampler(), state, num_prompts_per_step=3) == 0


def test_nobody_waits_for_what_cannot_come() -> None:
    ended = limits(prompts_left=False)
    for sampler in ALL:
        state = fresh(stamped=sampler.stamps_target_steps)
        assert isinstance(sampler.select(state, limits()), Wait)
        assert sampler.select(state, ended) == NothingLeft()
        assert isinstance(sampler.select(after(state, reserve(0)), ended), Wait)
    gated = ReadyFirstSampler()
    assert gated.select(fresh(), limits()) == Wait(reason=WaitReason.NOT_ADMITTED)


def test_only_policies_with_a_window_of_weights_abort_what_runs() -> None:
    for sampler in ALL:
        windowed = isinstance(sampler, WindowedSampler | WeightFifoSampler)
        old = sampler.should_abort_inflight(start_weight_version=0, current_train_weight=2)
        young = sampler.should_abort_inflight(start_weight_version=1, current_train_weight=2)
        assert (old, young) == (windowed, False)


def test_in_order_evicts_only_groups_whose_step_has_passed() -> None:
    state = made_ready(two_batches(stamped=True), "e0p0", "e0p2")
    assert InOrderSampler().evict(state) == ()
    passed = replace(state, progress=replace(state.progress, trainer_version=1))
    assert InOrderSampler().evict(passed) == ("e0p0",)
    assert ReadyFirstSampler().evict(passed) == ()


def test_a_policy_without_room_for_a_shortfall_says_so() -> None:
    sampler = WeightFifoSampler()
    assert sampler.required_buffer_capacity(3) == 6
    full = replace(
        admitted(0, 1),
        runtime=replace(admitted(0, 1).runtime, batch_shortfall=HashTrieMap({0: 2})),
    )
    assert sampler.shortfall_step(full, "e0p0", limits()) is None


def test_the_cursor_of_a_checkpoint_without_one() -> None:
    for sampler in ALL:
        assert sampler.set_dispatch_index(0) == -1
        assert sampler.set_dispatch_index(7) == 6


def test_every_policy_fits_the_protocol() -> None:
    samplers: tuple[PromptGroupSampler, ...] = ALL
    assert [each.supports_buffer_checkpoint for each in samplers] == [True] * 4
    assert replace(WindowedSampler(), max_staleness_versions=0).is_on_policy
