"""Which rows are written again: a model of saves, and the bound on dead rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.rollout.row_segments import RowSegments, SavedRow, plan_row_save

NEEDS = st.lists(
    st.dictionaries(st.sampled_from("abcdefghij"), st.integers(1, 3), max_size=8), max_size=8
)


@given(NEEDS)
def test_every_needed_row_is_found_with_its_revision_and_little_else(
    saves: list[dict[str, int]],
) -> None:
    """Runs saves one after the other, each segment being a dictionary of revisions."""
    segments: dict[str, dict[str, int]] = {}
    rows: dict[str, SavedRow] = {}
    for number, needed in enumerate(saves):
        saved = RowSegments(rows=rows, row_counts={name: len(s) for name, s in segments.items()})
        plan = plan_row_save(needed, saved)
        kept = {name: segments[name] for name in plan.keep}
        if plan.write:
            kept[f"s{number}"] = {key: needed[key] for key in plan.write}
            for key in plan.write:
                rows[key] = SavedRow(segment=f"s{number}", revision=needed[key])
        segments = kept
        loaded: dict[str, int] = {}
        for content in segments.values():
            loaded.update(content)
        assert {key: loaded[key] for key in needed} == needed
        assert sum(len(content) for content in segments.values()) <= 2 * len(needed)


@given(st.dictionaries(st.integers(0, 99).map(str), st.integers(0, 20), max_size=30))
def test_rows_that_did_not_change_are_not_written_again(needed: dict[str, int]) -> None:
    rows = {key: SavedRow(segment="s", revision=revision) for key, revision in needed.items()}
    plan = plan_row_save(needed, RowSegments(rows=rows, row_counts={"s": len(rows)}))
    assert plan.write == ()
    assert plan.keep == (("s",) if needed else ())


def test_a_mostly_dead_segment_is_written_anew() -> None:
    rows = {key: SavedRow(segment="old", revision=1) for key in "abc"}
    saved = RowSegments(rows=rows, row_counts={"old": 3})
    assert plan_row_save({"a": 1}, saved).write == ("a",)
    assert plan_row_save({"a": 1, "b": 1}, saved).keep == ("old",)
