"""The journal: what is written is read, and a killed writer's half line does no harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollsync.shell.journal import (
    Finished,
    Journal,
    JournalDamaged,
    JournalEntry,
    PromptDropped,
    Resumed,
    Saved,
    StepClaimed,
    StepTrained,
    WeightsSynced,
    read_journal,
)

EVERY_KIND: tuple[JournalEntry, ...] = (
    Resumed(train_steps=2, source="step_000002", plan=("a",), refused=("b: torn",)),
    WeightsSynced(weight_version=2, bytes=5, seconds=0.5),
    StepClaimed(step=3, prompt_ids=("p", "q")),
    PromptDropped(prompt_id="r", reason="stale"),
    StepTrained(step=3, prompt_ids=("p", "q"), mean_reward=None, loss=None, weight_versions=(2, 2)),
    Saved(what="rollout_snapshot", saved=True, reason="completed", train_steps=3, pause_ms=0.1),
    Finished(train_steps=3, why="all steps are trained"),
)


def written(path: Path, *entries: JournalEntry) -> None:
    journal = Journal(path)
    for entry in entries:
        journal.write(entry)
    journal.close()


def test_every_kind_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "journal.jsonl"
    written(path, *EVERY_KIND)
    assert tuple(read_journal(path)) == EVERY_KIND


def test_a_missing_journal_has_no_entries(tmp_path: Path) -> None:
    assert list(read_journal(tmp_path / "journal.jsonl")) == []


def test_listeners_are_told_after_the_line_is_there(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    seen: list[list[JournalEntry]] = []
    journal.listen(lambda _: seen.append(list(read_journal(path))))
    journal.write(EVERY_KIND[0])
    journal.write(EVERY_KIND[1])
    journal.close()
    assert seen == [list(EVERY_KIND[:1]), list(EVERY_KIND[:2])]


def test_a_journal_cut_anywhere_keeps_its_whole_lines_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path, *EVERY_KIND)
    content = path.read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        whole = EVERY_KIND[: content[:cut].count(b"\n")]
        assert tuple(read_journal(path)) == whole
        written(path, EVERY_KIND[0])
        assert tuple(read_journal(path)) == (*whole, EVERY_KIND[0])


def test_a_half_line_longer_than_is_read_at_once_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    long = Resumed(train_steps=0, source=None, plan=("x" * 200_000,))
    written(path, EVERY_KIND[1], long)
    path.write_bytes(path.read_bytes()[:-1])
    written(path, EVERY_KIND[2])
    assert tuple(read_journal(path)) == EVERY_KIND[1:3]


@pytest.mark.parametrize("line", [b"\n", b"no json\n", b"{}\n", b"\0\0\0\n"])
def test_a_whole_line_that_is_none_of_a_journal_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    written(path, *EVERY_KIND[:2])
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(JournalDamaged, match=r"journal\.jsonl, line 3"):
        list(read_journal(path))
