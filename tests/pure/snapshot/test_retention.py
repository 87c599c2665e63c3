"""What retention never removes, whatever is on disk and whatever the limits are."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollsync.pure.config import RetentionConfig
from rollsync.pure.snapshot.places import BundlePlace
from rollsync.pure.snapshot.retention import (
    BundleCondition,
    ListedBundle,
    RetentionPlan,
    plan_retention,
)

WHOLE, DAMAGED, UNKNOWN = BundleCondition
SEGMENTS = ("a", "b", "c", "d")


def place(step: int, number: int = 0) -> BundlePlace:
    return BundlePlace(step=step, number=number)


def bundle(
    step: int,
    number: int = 0,
    condition: BundleCondition = WHOLE,
    segments: tuple[str, ...] | None = (),
) -> ListedBundle:
    return ListedBundle(place=place(step, number), condition=condition, segments=segments)


def limits(trainer_checkpoints: int, snapshots_per_checkpoint: int) -> RetentionConfig:
    return RetentionConfig(
        trainer_checkpoints=trainer_checkpoints, snapshots_per_checkpoint=snapshots_per_checkpoint
    )


@st.composite
def listings(draw: st.DrawFn) -> tuple[ListedBundle, ...]:
    """Run directories: every snapshot above step 0 has its checkpoint's directory."""
    conditions = st.sampled_from(BundleCondition)
    needed = st.none() | st.lists(st.sampled_from(SEGMENTS), unique=True).map(tuple)
    found = []
    for step in draw(st.sets(st.integers(0, 5))):
        if step > 0:
            found.append(bundle(step, 0, draw(conditions), draw(needed)))
        found.extend(
            bundle(step, number, draw(conditions), draw(needed))
            for number in draw(st.sets(st.integers(1, 5), max_size=4))
        )
    return tuple(found)


some_limits = st.builds(limits, st.integers(1, 3), st.integers(1, 3))


def remaining(listing: tuple[ListedBundle, ...], plan: RetentionPlan) -> list[ListedBundle]:
    return [
        each
        for each in listing
        if each.place.step not in plan.anchors and each.place not in plan.snapshots
    ]


@given(listings(), some_limits, st.data())
@settings(max_examples=500, deadline=None)
def test_what_must_stay_stays(
    listing: tuple[ListedBundle, ...],
    kept: RetentionConfig,
    data: st.DataObject,
) -> None:
    places_there = [each.place for each in listing]
    protected = data.draw(st.sets(st.sampled_from([place(9, 9), *places_there])))
    protected_segments = data.draw(st.sets(st.sampled_from(SEGMENTS)))
    plan = plan_retention(
        listing,
        kept,
        protected=protected,
        segments=SEGMENTS,
        protected_segments=protected_segments,
    )
    left = remaining(listing, plan)
    places = {each.place for each in left}

    whole = [each.place for each in listing if each.condition is WHOLE]
    if whole:
        assert max(whole) in places
    else:
        assert left == list(listing)
    assert protected & set(places_there) <= places
    for each in left:
        if each.place.is_snapshot and each.place.step > 0:
            assert each.place.anchor in places
    assert {each.place for each in listing if each.condition is UNKNOWN} <= places

    needed = {name for each in left for name in each.segments or ()} | protected_segments
    assert not needed & set(plan.segments)
    if any(each.segments is None for each in left):
        assert plan.segments == ()
    else:
        assert set(plan.segments) == set(SEGMENTS) - needed

    # Once it is carried out, there is nothing more to do.
    again = plan_retention(
        left,
        kept,
        protected=protected,
        segments=set(SEGMENTS) - set(plan.segments),
        protected_segments=protected_segments,
    )
    assert again == RetentionPlan(anchors=(), snapshots=(), segments=())


@given(listings(), some_limits)
@settings(max_examples=300, deadline=None)
def test_no_more_stays_than_the_limits_allow(
    listing: tuple[ListedBundle, ...], kept: RetentionConfig
) -> None:
    readable = tuple(each for each in listing if each.condition is WHOLE)
    steps = {each.place.step for each in readable}
    listing = tuple(
        each
        for each in readable
        if each.place.step == 0 or place(each.place.step) in {other.place for other in readable}
    )
    left = remaining(listing, plan_retention(listing, kept))
    assert len({each.place.step for each in left}) <= kept.trainer_checkpoints
    for step in steps:
        snapshots = [each for each in left if each.place.step == step and each.place.is_snapshot]
        assert len(snapshots) <= kept.snapshots_per_checkpoint


def test_the_oldest_go_by_number_and_not_by_name() -> None:
    listing = tuple(bundle(step, number) for step in (9, 10, 100) for number in (0, 9, 10, 100))
    plan = plan_retention(listing, limits(2, 1))
    assert plan.anchors == (9,)
    assert plan.snapshots == (place(10, 9), place(10, 10), place(100, 9), place(100, 10))


def test_checkpoints_go_oldest_first() -> None:
    steps = [16, 2, 100, 8, 33, 1, 64]
    plan = plan_retention([bundle(step) for step in steps], limits(1, 1))
    assert plan.anchors == (1, 2, 8, 16, 33, 64)


def test_snapshots_from_before_a_resume_count() -> None:
    listing = (bundle(1), *(bundle(1, number) for number in (1, 2, 3, 4)))
    plan = plan_retention(listing, limits(1, 2), protected=[place(1, 2)])
    assert plan.snapshots == (place(1, 1),)


def test_damaged_ones_do_not_count_and_go_once_something_newer_is_whole() -> None:
    listing = (
        bundle(1),
        bundle(1, 1),
        bundle(1, 2, DAMAGED),
        bundle(1, 3),
        bundle(1, 4, DAMAGED),
    )
    plan = plan_retention(listing, limits(1, 2))
    assert plan.snapshots == (place(1, 2),), "2 is older than 3, 4 is not"


def test_a_checkpoint_stays_for_the_snapshot_that_was_resumed_from() -> None:
    listing = (bundle(1), bundle(1, 1), bundle(1, 2), bundle(2), bundle(3))
    plan = plan_retention(listing, limits(1, 1), protected=[place(1, 1)])
    assert plan.anchors == (2,)
    assert plan.snapshots == (place(1, 2),)


def test_a_checkpoint_that_stays_for_a_snapshot_keeps_its_own_segments() -> None:
    listing = (bundle(1, 0, WHOLE, ("a",)), bundle(1, 1, WHOLE, ("b",)), bundle(2, 0, WHOLE, ()))
    plan = plan_retention(listing, limits(1, 1), protected=[place(1, 1)], segments=SEGMENTS[::-1])
    assert plan == RetentionPlan(anchors=(), snapshots=(), segments=("c", "d"))


def test_a_checkpoint_stays_for_the_snapshot_that_is_being_written() -> None:
    listing = (bundle(1), bundle(1, 1), bundle(2))
    plan = plan_retention(listing, limits(1, 1), protected=[place(1, 2)])
    assert (plan.anchors, plan.snapshots) == ((), (place(1, 1),))


def test_snapshots_before_the_first_checkpoint_go_with_their_turn() -> None:
    listing = (bundle(0, 1), bundle(0, 2), bundle(1), bundle(2))
    assert plan_retention(listing, limits(3, 1)).snapshots == (place(0, 1),)
    assert plan_retention(listing, limits(2, 1)).snapshots == (place(0, 1), place(0, 2))
