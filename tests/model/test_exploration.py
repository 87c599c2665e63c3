"""The promise holds at every moment that a small world can reach.

`-s` prints the counts. The default suite explores worlds of one sibling, or of fewer prompts; the
worlds of three prompts with two siblings each are marked slow.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollsync.pure.rollout import (
    BuiltInSampler,
    InOrderSampler,
    ReadyFirstSampler,
    RecoveryGranularity,
    ReservedGroups,
    WeightFifoSampler,
    WindowedSampler,
)
from tests.model.essence import essence
from tests.model.explore import Report, explore
from tests.model.world import Config
from tests.processes import in_processes

SAMPLERS: tuple[BuiltInSampler, ...] = (
    WindowedSampler(),
    ReadyFirstSampler(),
    WeightFifoSampler(),
    InOrderSampler(),
)


def explored(config: Config) -> Report:
    report = explore(config)
    assert report.counterexample == (), "\n  ".join(report.counterexample)
    assert report.ends > 0
    assert crashes(report) > 0
    name = type(config.sampler).__name__
    print(
        f"{name}: {config.prompts} prompts x {config.siblings} siblings, {config.crashes} crashes, "
        f"{config.faults} faults: {report.states} states, {report.transitions} transitions, "
        f"{crashes(report)} of them crashes, {report.ends} ends"
    )
    return report


def crashes(report: Report) -> int:
    return sum(count for kind, count in report.kinds if "CRASH" in kind)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda each: type(each).__name__)
def test_three_prompts_with_one_sibling(sampler: BuiltInSampler) -> None:
    report = explored(Config(sampler=sampler, siblings=1, crashes=1, spares=0))
    assert report.states > 1_000


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda each: type(each).__name__)
def test_two_prompts_with_two_siblings_over_two_epochs(sampler: BuiltInSampler) -> None:
    report = explored(Config(sampler=sampler, prompts=2, epoch=1, batch=1, crashes=1, spares=0))
    assert report.states > 500


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda each: type(each).__name__)
def test_whole_groups_are_restarted(sampler: BuiltInSampler) -> None:
    whole = RecoveryGranularity.PROMPT_GROUP
    report = explored(Config(sampler=sampler, prompts=2, spares=0, faults=0, granularity=whole))
    assert report.states > 500


@pytest.mark.parametrize(
    "sampler",
    [
        WindowedSampler(sample_freshest_first=True),
        ReadyFirstSampler(max_staleness_versions=0),
        WeightFifoSampler(max_staleness_versions=0),
        InOrderSampler(max_lookahead_versions=0),
        InOrderSampler(max_lookahead_versions=2),
    ],
    ids=str,
)
def test_other_windows(sampler: BuiltInSampler) -> None:
    report = explored(Config(sampler=sampler, siblings=1, batch=1, crashes=1, faults=0, spares=0))
    # One batch a step, admitted no earlier than the policy allows: nothing grows too old.
    assert "drop (stale)" not in dict(report.kinds)


def test_in_order_trains_the_same_batches_in_every_run() -> None:
    readmitting = tuple((load, ReservedGroups.READMIT) for load in (True, False))
    report = explored(
        Config(
            sampler=InOrderSampler(),
            prompts=4,
            siblings=1,
            crashes=1,
            faults=0,
            spares=0,
            resumes=readmitting,
        )
    )
    assert report.states > 1_000


def test_groups_that_grow_too_old_are_dropped_with_a_reason() -> None:
    report = explored(
        Config(
            sampler=WindowedSampler(max_staleness_versions=0),
            siblings=1,
            batch=1,
            crashes=1,
            faults=0,
            spares=0,
            slack=1,
        )
    )
    assert dict(report.kinds)["drop (stale)"] > 0


def test_a_spare_takes_a_dropped_prompt_s_place() -> None:
    report = explored(Config(sampler=InOrderSampler(), siblings=1, crashes=1, prompts=2, batch=1))
    assert dict(report.kinds)["keep"] > 0
    assert dict(report.kinds)["drop (unrecoverable)"] > 0


def test_attempts_that_fail_are_made_again() -> None:
    config = Config(sampler=InOrderSampler(), siblings=1, prompts=2, batch=1, faults=3, spares=0)
    report = explored(replace(config, max_failed_attempts=2, crashes=1))
    assert dict(report.kinds)["fail"] > dict(report.kinds)["drop (unrecoverable)"]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda each: type(each).__name__)
def test_leaving_out_what_cannot_matter_hides_nothing(sampler: BuiltInSampler) -> None:
    config = Config(sampler=sampler, siblings=1, prompts=2, batch=1, crashes=1, spares=0)
    whole: set[Hashable] = set()
    merged: set[Hashable] = set()
    unmerged = explore(
        config, key_of=lambda node: node, visit=lambda node: whole.add(essence(node))
    )
    report = explore(config, visit=lambda node: merged.add(essence(node)))
    assert unmerged.counterexample == report.counterexample == ()
    assert merged == whole
    assert report.states < unmerged.states


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_prompts_with_two_siblings() -> None:
    # The slack lets the windowed policy oversample, so that groups grow too old; the others never
    # use it.
    worlds = [Config(sampler=sampler, slack=1) for sampler in SAMPLERS]
    reports = in_processes(explored, worlds)
    total = sum(report.states for report in reports)
    print(f"{total} distinct states in all")
    assert total >= 200_000
    document = (Path(__file__).parents[2] / "docs" / "resume-correctness.md").read_text()
    for report in reports:
        row = f"{report.states:,} | {report.transitions:,} | {crashes(report):,} |"
        assert row in document, f"docs/resume-correctness.md has other counts than {row}"
