"""The account closes for honest records, and each kind of finding can occur."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollsync.pure.rollout.audit import (
    ProcessBegan,
    StepRecorded,
    TrainingRecord,
    audit,
    describe_audit,
    lineage,
)
from rollsync.pure.rollout.state import RolloutState, Trained
from tests.pure.rollout.events_kit import admit, after, drop, fresh, made_ready, reserve, train

DATASET = 9
BEGAN = ProcessBegan(train_steps=0)


def step(number: int, *prompt_ids: str) -> StepRecorded:
    return StepRecorded(step=number, prompt_ids=prompt_ids)


def two_steps() -> RolloutState:
    """Two prompts trained, one a step; one dropped, one waiting."""
    state = after(fresh(), reserve(0, 1, 2, 3))
    state = made_ready(after(state, admit(state, 0, 1, 2, 3)), "e0p0", "e0p1")
    state = after(state, *train(state, "e0p0"))
    return after(state, *train(state, "e0p1"), drop("e0p2", None))


HONEST: tuple[TrainingRecord, ...] = (BEGAN, step(1, "e0p0"), step(2, "e0p1"))


def test_honest_records_close() -> None:
    result = audit(two_steps(), HONEST, dataset_size=DATASET)
    assert result.closes
    assert (result.handed_out, result.trained_once, result.lost) == (4, 2, 0)
    lines = describe_audit(result)
    assert lines[-1] == "the account closes"
    assert any("1 unrecoverable" in line for line in lines)
    assert any(line.startswith("still waiting") and "1 admitted" in line for line in lines)


def test_steps_that_a_resume_went_back_behind_do_not_count() -> None:
    records = (*HONEST[:2], step(2, "e0p3"), ProcessBegan(train_steps=1), step(2, "e0p1"))
    result = audit(two_steps(), records, dataset_size=DATASET)
    assert result.closes
    assert result.thrown_away_steps == 1


def test_steps_after_the_save_do_not_count_yet() -> None:
    assert audit(two_steps(), (*HONEST, step(3, "e0p3")), dataset_size=DATASET).closes


def test_a_lost_prompt_is_found() -> None:
    state = two_steps()
    moved = replace(state.dataloader_state, position=state.dataloader_state.position + 1)
    result = audit(replace(state, dataloader_state=moved), HONEST, dataset_size=DATASET)
    assert result.lost == 1
    assert not result.closes
    assert describe_audit(result)[-1] == "THE ACCOUNT DOES NOT CLOSE"


def test_epochs_count_in_what_was_handed_out() -> None:
    state = two_steps()
    turned = replace(state.dataloader_state, epoch=1, position=0)
    result = audit(replace(state, dataloader_state=turned), HONEST, dataset_size=4)
    assert (result.handed_out, result.lost) == (4, 0)


def test_a_prompt_trained_twice_is_found() -> None:
    records = (BEGAN, step(1, "e0p0"), step(2, "e0p1", "e0p0"))
    result = audit(two_steps(), records, dataset_size=DATASET)
    assert result.trained_twice == ("e0p0",)
    assert not result.closes
    assert "! trained twice: e0p0" in describe_audit(result)


def test_a_prompt_in_two_places_is_found() -> None:
    state = two_steps()
    twice = replace(state, outcomes=state.outcomes.insert("e0p3", Trained(step=2)))
    records = (BEGAN, step(1, "e0p0"), step(2, "e0p1", "e0p3"))
    result = audit(twice, records, dataset_size=DATASET)
    assert result.account.in_two_places == ("e0p3",)
    assert not result.closes
    assert "! in two places: e0p3" in describe_audit(result)


def test_a_prompt_that_only_one_record_calls_trained_is_found() -> None:
    for records in ((BEGAN, step(1, "e0p0"), step(2)), (*HONEST[:2], step(2, "e0p1", "e0p3"))):
        result = audit(two_steps(), records, dataset_size=DATASET)
        assert len(result.disagreements) == 1
        assert not result.closes


def test_a_prompt_at_another_step_is_found() -> None:
    records = (BEGAN, step(1, "e0p1"), step(2, "e0p0"))
    result = audit(two_steps(), records, dataset_size=DATASET)
    assert len(result.disagreements) == 2
    assert "the state says step 1, the journal says step 2" in result.disagreements[0]


def test_a_step_that_the_journal_lacks_is_found() -> None:
    state = after(fresh(), reserve(0, 1))
    state = made_ready(after(state, admit(state, 0, 1)), "e0p0")
    state = after(state, *train(state, "e0p0"))
    result = audit(state, (BEGAN,), dataset_size=DATASET)
    assert any("the state counts 1" in each for each in result.disagreements)


@given(resumes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=8))
def test_the_lineage_is_what_a_resume_went_on_from(resumes: list[tuple[int, int]]) -> None:
    records: list[TrainingRecord] = []
    kept: list[StepRecorded] = []
    made = 0
    for process, (wanted, steps) in enumerate(resumes):
        at = min(wanted, len(kept))
        records.append(ProcessBegan(train_steps=at))
        del kept[at:]
        for number in range(at + 1, at + steps + 1):
            kept.append(step(number, f"{process}/{number}"))
            records.append(kept[-1])
            made += 1
    found, undone = lineage(records)
    assert list(found) == kept
    assert undone == made - len(kept)
