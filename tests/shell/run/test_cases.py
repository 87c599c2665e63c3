"""Situations in which runs of this kind have gone wrong, each with a real run."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollsync.pure.rollout.order import HandOutPlace
from rollsync.pure.rollout.sampler import InOrderSampler, WindowedSampler
from rollsync.pure.rollout.state import Dropped, DropReason, RolloutState
from rollsync.pure.snapshot.manifest import MANIFEST_FILE
from rollsync.shell.config import read_config
from rollsync.shell.journal import Finished, PromptDropped, Resumed, Saved, StepTrained
from rollsync.shell.run.saved import CONFIG, read_saved, write_config
from tests.shell.run.child import COMMIT, ENDED, STOPPED, Moment, Order
from tests.shell.run.runs import (
    KILLED,
    STEPS,
    Children,
    closed_account,
    entries_of,
    run_to_the_end,
    small_config,
    write_file,
)

POISON = 5


def prompt_id(position: int) -> str:
    return HandOutPlace(epoch=0, position=position).prompt_id


def assert_dropped(state: RolloutState, position: int) -> None:
    outcome = state.outcomes[prompt_id(position)]
    assert isinstance(outcome, Dropped)
    assert outcome.reason is DropReason.UNRECOVERABLE


def test_a_dataset_that_does_not_divide_into_batches_is_trained_whole(
    children: Children, tmp_path: Path, model_path: Path
) -> None:
    config = small_config(tmp_path / "run", model_path)
    config = replace(
        config, data=replace(config.data, size=7), grpo=replace(config.grpo, max_steps=20)
    )
    order = Order(config=write_file(config), moment=Moment(kind="StepTrained", count=3))
    assert children.run(order) == KILLED
    run_to_the_end(children, config)
    state, _ = closed_account(config)
    assert state.progress.train_steps == 4
    run_to_the_end(children, config)
    assert closed_account(config)[0] == state


def test_the_epoch_turns_across_a_kill(
    children: Children, tmp_path: Path, model_path: Path
) -> None:
    config = small_config(tmp_path / "run", model_path)
    config = replace(config, data=replace(config.data, size=5, max_epochs=3))
    file = write_file(config)
    for count in (2, 2):
        order = Order(config=file, moment=Moment(kind="StepTrained", count=count))
        assert children.run(order) == KILLED
    assert children.run(Order(config=file)) == ENDED
    state, audit = closed_account(config)
    assert state.progress.train_steps == STEPS
    assert audit.trained_once == 2 * STEPS
    epochs = Counter(name.partition("-")[0] for name in state.outcomes)
    assert epochs == {"e0": 5, "e1": 5, "e2": 2}


@pytest.mark.parametrize("sampler", [InOrderSampler(), WindowedSampler()], ids=["order", "window"])
def test_a_prompt_that_never_works_is_dropped_also_across_resumes(
    sampler: InOrderSampler | WindowedSampler,
    children: Children,
    tmp_path: Path,
    model_path: Path,
) -> None:
    config = replace(small_config(tmp_path / "run", model_path), sampler=sampler)
    file = write_file(config)
    for moment in (Moment(kind="StepClaimed", count=2), Moment(kind="Saved", count=2)):
        order = Order(config=file, moment=moment, poison_position=POISON)
        assert children.run(order) == KILLED
    run_to_the_end(children, config, poison_position=POISON)
    state, _ = closed_account(config)
    assert_dropped(state, POISON)
    told = [entry for entry in entries_of(config) if isinstance(entry, PromptDropped)]
    assert (prompt_id(POISON), "unrecoverable") in [(each.prompt_id, each.reason) for each in told]


def test_prompts_that_are_dropped_last_are_saved_as_dropped(
    children: Children, tmp_path: Path, model_path: Path
) -> None:
    """Nothing is trained after them, so that no step's checkpoint says what became of them."""
    config = small_config(tmp_path / "run", model_path)
    config = replace(
        config,
        data=replace(config.data, size=5),
        grpo=replace(config.grpo, max_steps=20),
        checkpointing=replace(config.checkpointing, snapshot_interval_s=1000.0),
        sampler=WindowedSampler(max_staleness_versions=9),
    )
    run_to_the_end(children, config, poison_position=4)
    state, _ = closed_account(config)
    assert_dropped(state, 4)
    assert state.progress.train_steps == 2


def test_a_spare_takes_the_place_of_a_dropped_prompt(
    children: Children, tmp_path: Path, model_path: Path
) -> None:
    config = small_config(tmp_path / "run", model_path)
    config = replace(
        config,
        data=replace(config.data, size=13),
        recovery=replace(config.recovery, replacement_reserve=2),
    )
    order = Order(
        config=write_file(config),
        moment=Moment(kind="StepTrained", count=2),
        poison_position=POISON,
    )
    assert children.run(order) == KILLED
    run_to_the_end(children, config, poison_position=POISON)
    state, audit = closed_account(config)
    assert state.progress.train_steps == STEPS
    assert audit.trained_once == 2 * STEPS


@pytest.mark.parametrize("kind", ["StepClaimed", "StepTrained", "WeightsSynced"])
def test_a_run_that_is_asked_to_stop_saves_and_can_be_resumed(
    kind: str, children: Children, tmp_path: Path, model_path: Path
) -> None:
    config = small_config(tmp_path / "run", model_path)
    config = replace(
        config, checkpointing=replace(config.checkpointing, snapshot_interval_s=1000.0)
    )
    moment = Moment(kind=kind, count=1, signal=signal.SIGTERM.value)
    assert children.run(Order(config=write_file(config), moment=moment)) == STOPPED
    entries = entries_of(config)
    assert isinstance(entries[-1], Finished)
    saves = [entry for entry in entries if isinstance(entry, Saved)]
    assert saves[-1].saved
    closed_account(config)
    run_to_the_end(children, config)
    resumed = [entry for entry in entries_of(config) if isinstance(entry, Resumed)]
    assert resumed[-1].source is not None
    assert (Path(config.run.directory) / resumed[-1].source).is_dir()


def test_a_run_that_is_asked_to_stop_before_its_first_sync_can_be_started_again(
    children: Children, tmp_path: Path, model_path: Path
) -> None:
    config = small_config(tmp_path / "run", model_path)
    moment = Moment(kind="Resumed", signal=signal.SIGTERM.value)
    assert children.run(Order(config=write_file(config), moment=moment)) == STOPPED
    ended = entries_of(config)[-1]
    assert isinstance(ended, Finished)
    assert ended.why.startswith("asked to stop")
    run_to_the_end(children, config)


@pytest.mark.parametrize("every", [1, 100], ids=["checkpoints", "no checkpoints"])
def test_a_run_that_is_asked_to_stop_in_an_optimizer_commit_ends_the_step_first(
    every: int, children: Children, tmp_path: Path, model_path: Path
) -> None:
    config = small_config(tmp_path / "run", model_path)
    rare = replace(config.checkpointing, snapshot_interval_s=1000.0, trainer_every_steps=every)
    config = replace(config, checkpointing=rare)
    moment = Moment(kind=COMMIT, count=2, signal=signal.SIGTERM.value)
    assert children.run(Order(config=write_file(config), moment=moment)) == STOPPED
    entries = entries_of(config)
    trained = [entry.step for entry in entries if isinstance(entry, StepTrained)]
    assert trained[-1] >= 2
    newest = [entry for entry in entries if isinstance(entry, Saved)][-1]
    assert (newest.saved, newest.train_steps) == (True, trained[-1])
    run_to_the_end(children, config)
    _, audit = closed_account(config)
    assert audit.thrown_away_steps == 0


@pytest.mark.parametrize("every", [1, 1000], ids=["checkpoints", "no checkpoints"])
def test_a_run_with_a_deadline_saves_its_steps_before_it_and_goes_on_later(
    every: int, children: Children, tmp_path: Path, model_path: Path
) -> None:
    config = small_config(tmp_path / "run", model_path)
    config = replace(
        config,
        data=replace(config.data, size=2000),
        grpo=replace(config.grpo, max_steps=1000),
        checkpointing=replace(
            config.checkpointing,
            snapshot_interval_s=1000.0,
            trainer_every_steps=every,
            # The last save is begun half a minute before.
            checkpoint_must_save_by_s=31.0,
        ),
    )
    assert children.run(Order(config=write_file(config))) == STOPPED
    entries = entries_of(config)
    finished = entries[-1]
    assert isinstance(finished, Finished)
    # A snapshot is what comes last where it waited for the checkpoint of the last step.
    hows = {"the last step has its checkpoint", "last snapshot: completed"}
    assert finished.why in {f"the deadline to save by has come; {how}" for how in hows}
    newest = [entry for entry in entries if isinstance(entry, Saved)][-1]
    assert (newest.saved, newest.train_steps) == (True, finished.train_steps)
    config = replace(
        config,
        grpo=replace(config.grpo, max_steps=finished.train_steps + 1),
        checkpointing=replace(config.checkpointing, checkpoint_must_save_by_s=None),
    )
    assert children.run(Order(config=write_file(config))) == ENDED
    state, audit = closed_account(config)
    assert state.progress.train_steps == finished.train_steps + 1
    assert audit.thrown_away_steps == 0


@pytest.mark.parametrize("kind", ["StepClaimed", "StepTrained"])
def test_a_run_that_is_asked_to_stop_between_checkpoints_loses_no_step(
    kind: str, children: Children, tmp_path: Path, model_path: Path
) -> None:
    config = small_config(tmp_path / "run", model_path)
    rare = replace(config.checkpointing, snapshot_interval_s=1000.0, trainer_every_steps=100)
    config = replace(config, checkpointing=rare)
    moment = Moment(kind=kind, count=2, signal=signal.SIGTERM.value)
    assert children.run(Order(config=write_file(config), moment=moment)) == STOPPED
    run_to_the_end(children, config)
    _, audit = closed_account(config)
    assert audit.thrown_away_steps == 0


def test_what_was_passed_over_is_in_the_journal_with_its_reason(
    children: Children, tmp_path: Path, model_path: Path
) -> None:
    config = small_config(tmp_path / "run", model_path)
    moment = Moment(kind="StepTrained", count=3)
    assert children.run(Order(config=write_file(config), moment=moment)) == KILLED
    newest = read_saved(Path(config.run.directory)).bundle.path
    manifest = newest / MANIFEST_FILE
    manifest.write_bytes(manifest.read_bytes()[:-1])
    run_to_the_end(children, config)
    resumed = [entry for entry in entries_of(config) if isinstance(entry, Resumed)][-1]
    name = newest.relative_to(config.run.directory).as_posix()
    assert resumed.source != name
    assert resumed.refused[0].startswith(f"{name}: {MANIFEST_FILE}: ")


def test_a_configuration_is_noted_whole_or_not_at_all(tmp_path: Path, model_path: Path) -> None:
    """Whoever has opened the note of before goes on reading that, to its end."""
    config = small_config(tmp_path / "run", model_path)
    write_config(config)
    note = tmp_path / "run" / CONFIG
    before = note.read_bytes()
    (tmp_path / "run" / f"{CONFIG}.new").write_bytes(b"what a killed process had begun")
    with note.open("rb") as opened:
        write_config(replace(config, buffer_capacity=77))
        assert opened.read() == before
    assert read_config(note).buffer_capacity == 77
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [CONFIG]


def test_a_whole_batch_ready_at_the_resume_is_trained_at_once(
    children: Children, tmp_path: Path, model_path: Path
) -> None:
    """And generation goes on beside it: nobody waits for the other."""
    config = small_config(tmp_path / "run", model_path)
    moment = Moment(kind="StepClaimed", count=2, signal=signal.SIGTERM.value)
    assert children.run(Order(config=write_file(config), moment=moment)) == STOPPED
    run_to_the_end(children, config)
    steps = [entry.step for entry in entries_of(config) if isinstance(entry, StepTrained)]
    assert set(steps) == set(range(1, STEPS + 1))


def test_a_resume_that_does_not_load_the_buffer_generates_again(
    children: Children, tmp_path: Path, model_path: Path
) -> None:
    config = small_config(tmp_path / "run", model_path)
    moment = Moment(kind="StepClaimed", count=2, signal=signal.SIGTERM.value)
    assert children.run(Order(config=write_file(config), moment=moment)) == STOPPED
    run_to_the_end(
        children, replace(config, recovery=replace(config.recovery, load_replay_buffer=False))
    )
    state, audit = closed_account(config)
    assert state.progress.train_steps == STEPS
    assert audit.trained_once == 2 * STEPS
