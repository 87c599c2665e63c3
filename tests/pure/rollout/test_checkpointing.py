"""The records of saving and restoring, as people see them."""

from __future__ import annotations

from rollsync.pure.rollout.checkpointing import (
    ResumeSource,
    RolloutTrace,
    RolloutTraceEvent,
    RolloutTraceKind,
)


def test_a_trace_keeps_events_in_order_and_prints_them() -> None:
    cut = RolloutTraceEvent(kind=RolloutTraceKind.CUT_TAKEN, subject="step 3", elapsed_s=0.25)
    published = RolloutTraceEvent(
        kind=RolloutTraceKind.PUBLISHED, subject="000004", detail="12 files", elapsed_s=1.5
    )
    trace = RolloutTrace(events=(cut, published))
    assert trace.lines() == (
        "    0.250 s  cut_taken            step 3",
        "    1.500 s  published            000004: 12 files",
    )
    assert RolloutTrace().lines() == ()


def test_a_resume_source_describes_a_fresh_run_by_default() -> None:
    source = ResumeSource()
    assert source.path is None
    assert not source.from_rollout_snapshot
