"""Which rows are written again: a model of saves, and the bound on dead rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.rollout.row_segments import (
    SavedRow,
    after_save,
    found_segments,
    nothing_saved,
    plan_row_save,
)

NEEDS = st.lists(
    st.dictionaries(st.sampled_from("abcdefghij"), st.integers(1, 3), max_size=8), max_size=8
)


def in_segment(name: str, revisions: dict[str, int]) -> dict[str, SavedRow]:
    return {key: SavedRow(segment=name, revision=each) for key, each in revisions.items()}


@given(NEEDS, st.data())
def test_every_needed_row_is_found_with_its_revision_and_little_else(
    saves: list[dict[str, int]], data: st.DataObject
) -> None:
    """Runs saves one after the other. What is the same as before may be named, or left out."""
    contents: dict[str, dict[str, int]] = {}
    saved = nothing_saved()
    for number, needed in enumerate(saves):
        same = sorted(key for key, row in saved.rows.items() if needed.get(key) == row.revision)
        unnamed = data.draw(st.sets(st.sampled_from(same))) if same else set()
        plan = plan_row_save(
            {key: revision for key, revision in needed.items() if key not in unnamed},
            saved,
            gone=[key for key in "abcdefghijz" if key not in needed],
        )
        name = f"s{number}"
        if plan.write:
            contents[name] = dict(plan.write)
        saved = after_save(plan, saved, {name: in_segment(name, plan.write)} if plan.write else {})
        loaded: dict[str, int] = {}
        for segment in saved.segments:
            assert set(segment.keys) == set(contents[segment.name])
            loaded.update(contents[segment.name])
        assert {key: loaded[key] for key in needed} == needed
        assert {key: row.revision for key, row in saved.rows.items()} == needed
        for segment in saved.segments:
            live = [key for key, row in saved.rows.items() if row.segment == segment.name]
            assert (len(live), bool(live)) == (segment.live, True)
        assert sum(len(segment.keys) for segment in saved.segments) <= 2 * len(needed)


@given(st.dictionaries(st.integers(0, 99).map(str), st.integers(0, 20), max_size=30))
def test_rows_that_did_not_change_are_not_written_again(needed: dict[str, int]) -> None:
    saved = found_segments({"s": needed}, in_segment("s", needed))
    for named in (needed, {}):
        plan = plan_row_save(named, saved, gone=())
        assert plan.write == {}
        assert [segment.name for segment in plan.keep] == (["s"] if needed else [])


def test_a_mostly_dead_segment_is_written_anew() -> None:
    saved = found_segments({"old": "abc"}, in_segment("old", {"a": 1, "b": 1, "c": 1}))
    assert plan_row_save({}, saved, gone="bc").write == {"a": 1}
    (kept,) = plan_row_save({}, saved, gone="c").keep
    assert (kept.name, kept.live) == ("old", 2)


def test_rows_that_a_resume_did_not_need_do_not_keep_a_segment() -> None:
    saved = found_segments({"old": "abcd"}, in_segment("old", {"a": 1}))
    plan = plan_row_save({}, saved, gone=())
    assert (plan.keep, plan.write) == ((), {"a": 1})
