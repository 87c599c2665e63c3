"""Closes the account of a run from two records made by different code: state and journal.

The state says where every prompt is. The journal says which prompts each process trained at which
step. A resume goes back to the step it starts from, so what earlier processes trained after that
step is not part of the resumed lineage. Rule kept here: what the two records disagree about is a
finding, never resolved in favour of one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from rollsync.pure.rollout.account import Account, account
from rollsync.pure.rollout.state import PromptPlace, RolloutState, Trained


class ProcessBegan(Struct, frozen=True, kw_only=True, tag=True):
    """A process took up the run after `train_steps` steps."""

    train_steps: int


class StepRecorded(Struct, frozen=True, kw_only=True, tag=True):
    """A process committed a step with these prompts."""

    step: int
    prompt_ids: tuple[str, ...]


TrainingRecord = ProcessBegan | StepRecorded


class Audit(Struct, frozen=True, kw_only=True):
    """What became of every prompt that was handed out."""

    account: Account
    handed_out: int
    """By the dataloader, as its position says."""
    lost: int
    """Handed out and in no place."""
    trained_once: int
    trained_twice: tuple[str, ...]
    """Prompt ids that two steps of the lineage trained."""
    disagreements: tuple[str, ...]
    """Where state and journal differ, in words."""
    thrown_away_steps: int
    """Steps that a crash undid: trained by a process that died before they were saved."""

    @property
    def closes(self) -> bool:
        """Nothing lost, nothing trained twice, no prompt in two places, both records agree."""
        return not (
            self.lost or self.trained_twice or self.disagreements or self.account.in_two_places
        )


def lineage(records: Iterable[TrainingRecord]) -> tuple[tuple[StepRecorded, ...], int]:
    """The steps that the run is made of, in order, and how many were undone by a resume."""
    kept: list[StepRecorded] = []
    undone = 0
    for record in records:
        if isinstance(record, ProcessBegan):
            before = len(kept)
            kept = [each for each in kept if each.step <= record.train_steps]
            undone += before - len(kept)
        else:
            kept.append(record)
    return tuple(kept), undone


def audit(state: RolloutState, records: Iterable[TrainingRecord], *, dataset_size: int) -> Audit:
    """Close the account.

    Args:
        state: the run's state, read from its newest save.
        records: what the journal says, oldest first.
        dataset_size: samples in an epoch.
    """
    steps, undone = lineage(records)
    steps = tuple(each for each in steps if each.step <= state.progress.train_steps)
    times = Counter(prompt_id for step in steps for prompt_id in step.prompt_ids)
    in_journal = {prompt_id: step.step for step in steps for prompt_id in step.prompt_ids}
    in_state = {
        prompt_id: outcome.step
        for prompt_id, outcome in state.outcomes.items()
        if isinstance(outcome, Trained)
    }
    found = account(state)
    position = state.dataloader_state
    handed_out = position.epoch * dataset_size + position.position
    disagreements = [
        f"{prompt_id}: the state says step {in_state.get(prompt_id)}, "
        f"the journal says step {in_journal.get(prompt_id)}"
        for prompt_id in sorted(in_state.keys() | in_journal.keys())
        if in_state.get(prompt_id) != in_journal.get(prompt_id)
    ]
    numbers = [step.step for step in steps]
    if numbers != list(range(1, state.progress.train_steps + 1)):
        disagreements.append(
            f"the journal has the steps {numbers}, the state counts {state.progress.train_steps}"
        )
    return Audit(
        account=found,
        handed_out=handed_out,
        lost=handed_out - found.handed_out,
        trained_once=sum(count == 1 for count in times.values()),
        trained_twice=tuple(sorted(name for name, count in times.items() if count > 1)),
        disagreements=tuple(disagreements),
        thrown_away_steps=undone,
    )


def describe_audit(result: Audit) -> tuple[str, ...]:
    """The account in lines."""
    places = dict(result.account.by_place)
    dropped = [f"{count} {reason}" for reason, count in result.account.dropped_by_reason if count]
    waiting = {
        place: count
        for place, count in result.account.by_place
        if count and place not in (PromptPlace.TRAINED, PromptPlace.DROPPED)
    }
    lines = [
        f"prompts handed out          {result.handed_out}",
        f"trained exactly once        {result.trained_once}",
        f"dropped with a reason       {places[PromptPlace.DROPPED]}"
        + (f" ({', '.join(dropped)})" if dropped else ""),
        f"still waiting               {sum(waiting.values())}"
        + (f" ({', '.join(f'{n} {place}' for place, n in waiting.items())})" if waiting else ""),
        f"lost                        {result.lost}",
        f"trained twice               {len(result.trained_twice)}",
        f"steps undone by the crash   {result.thrown_away_steps} (their prompts were trained again"
        " from the checkpoint before)",
    ]
    lines += [f"! {each}" for each in result.disagreements]
    lines += [f"! trained twice: {name}" for name in result.trained_twice]
    lines += [f"! in two places: {name}" for name in result.account.in_two_places]
    lines.append("the account closes" if result.closes else "THE ACCOUNT DOES NOT CLOSE")
    return tuple(lines)
