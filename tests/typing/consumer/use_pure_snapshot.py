"""`rollsync.pure.snapshot` in someone else's program."""

from typing import assert_type

from rollsync.pure.config import MasterConfig, RetentionConfig
from rollsync.pure.snapshot import (
    BootstrapAnchor,
    BundleCondition,
    BundlePlace,
    LineageChanged,
    ListedBundle,
    RetentionPlan,
    StoreRefusal,
    bootstrap_anchor,
    describe_change,
    describe_refusal,
    lineage_change,
    plan_retention,
    resume_order,
)


def same_run(before: BootstrapAnchor, config: MasterConfig) -> str:
    now = bootstrap_anchor(config, "digest of the dataset")
    assert_type(now, BootstrapAnchor)
    change = lineage_change(before, now)
    assert_type(change, LineageChanged | None)
    describe_change(change)  # type: ignore[arg-type]
    return "the same" if change is None else describe_change(change)


def what_goes(places: list[BundlePlace]) -> RetentionPlan:
    listed = [
        ListedBundle(place=place, condition=BundleCondition.WHOLE, segments=()) for place in places
    ]
    assert_type(resume_order(places), tuple[BundlePlace, ...])
    plan_retention(places, RetentionConfig())  # type: ignore[arg-type]
    return plan_retention(listed, RetentionConfig(), protected=places[:1])


def words(refusal: StoreRefusal) -> str:
    describe_refusal("other run")  # type: ignore[arg-type]
    return describe_refusal(refusal)


place = BundlePlace(step=3, number=1)
assert_type(place.anchor, BundlePlace)
place.step = 4  # type: ignore[misc]
