"""The journal: what is written is read, and a killed writer's half line does no harm."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest

from rollsync.shell.journal import (
    Finished,
    Journal,
    JournalDamaged,
    JournalEntry,
    JournalLine,
    PromptDropped,
    Resumed,
    Saved,
    StepClaimed,
    StepTrained,
    WeightsSynced,
    entries_of,
    read_journal,
)
from tests.crash.operations import Operation, SimulatedFileSystem, Verb, no_fault

EVERY_KIND: tuple[JournalEntry, ...] = (
    Resumed(train_steps=2, source="step_000002", plan=("a",), refused=("b: torn",)),
    WeightsSynced(weight_version=2, bytes=5, seconds=0.5),
    StepClaimed(step=3, prompt_ids=("p", "q")),
    PromptDropped(prompt_id="r", reason="stale"),
    StepTrained(step=3, prompt_ids=("p", "q"), mean_reward=None, loss=None, weight_versions=(2, 2)),
    Saved(what="rollout_snapshot", saved=True, reason="completed", train_steps=3, pause_ms=0.1),
    Finished(train_steps=3, why="all steps are trained"),
)

SAVED = EVERY_KIND[5]


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
        if content[cut : cut + 1] == b"\n":  # The next process ends the line.
            whole = EVERY_KIND[: len(whole) + 1]
        written(path, *EVERY_KIND)
        assert tuple(read_journal(path)) == (*whole, *EVERY_KIND)
        assert path.read_bytes().count(b"\n\n") <= 1, "one line is ended, and no other"


@pytest.mark.parametrize("line", [b" \n", b"no json\n", b"{}\n", b"\0\0\0\n"])
def test_a_whole_line_that_is_none_of_a_journal_is_named(tmp_path: Path, line: bytes) -> None:
    """Two saves have come after it, so that a power failure cannot have made it."""
    written(path := tmp_path / "journal.jsonl", *EVERY_KIND[:2])
    path.write_bytes(path.read_bytes() + line)
    assert tuple(read_journal(path)) == EVERY_KIND[:2]
    lines = [msgspec.json.encode(JournalLine(at_s=0.0, entry=SAVED)) + b"\n"] * 2
    path.write_bytes(path.read_bytes() + lines[0])
    assert tuple(read_journal(path)) == (*EVERY_KIND[:2], SAVED)
    path.write_bytes(path.read_bytes() + lines[1])
    with pytest.raises(JournalDamaged, match=r"journal\.jsonl, line 3"):
        list(read_journal(path))


def test_nothing_but_saves_shows_that_a_line_was_durable(tmp_path: Path) -> None:
    written(path := tmp_path / "journal.jsonl", EVERY_KIND[0])
    others = (*EVERY_KIND[1:5], msgspec.structs.replace(SAVED, saved=False), SAVED)
    lines = (msgspec.json.encode(JournalLine(at_s=0.0, entry=entry)) + b"\n" for entry in others)
    path.write_bytes(path.read_bytes() + b"torn\n" + b"".join(lines))
    assert tuple(read_journal(path)) == (EVERY_KIND[0], *others)


def test_a_full_disk_stops_nobody_and_costs_only_the_lines_that_did_not_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = SimulatedFileSystem()
    files.make_directory(Path("/run"))
    told: list[JournalEntry] = []
    journal = Journal(Path("/run/journal.jsonl"), files)
    journal.listen(told.append)
    room = [10]

    def full(_: int, operation: Operation) -> OSError | int | None:
        if operation.verb is Verb.SYNC_FILE:
            return OSError(28, "No space left on device")
        if operation.verb is not Verb.WRITE:
            return None
        if not room:
            return OSError(28, "No space left on device")
        return room.pop()

    journal.write(EVERY_KIND[0])
    files.fault = full
    journal.write(EVERY_KIND[1])
    journal.write(EVERY_KIND[2])
    journal.sync()
    files.fault = no_fault
    journal.write(EVERY_KIND[3])
    assert told == list(EVERY_KIND[:4])
    lines = io.BytesIO(b"".join(files.read(Path("/run/journal.jsonl"))))
    assert list(entries_of(lines, source="j")) == [EVERY_KIND[0], EVERY_KIND[3]]
    assert caplog.text.count("lacks a line") == 2
    assert "may lack lines after a power failure" in caplog.text
