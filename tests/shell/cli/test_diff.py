"""`rollsync diff` on equal files, different ones, and files that cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from rpds import HashTrieSet

from rollsync.codecs import encode
from rollsync.pure.rollout.state import (
    PromptGroupStatus,
    RolloutAttemptRecord,
    RolloutAttemptStatus,
)
from rollsync.shell.cli import main
from tests.codecs.samples.recovery_ledger import ADMITTED, RESERVED, ledger
from tests.codecs.samples.rollout_state import FULL

CHANGED = replace(
    FULL,
    sampler_dispatch_index=6,
    open_step=None,
    rows_to_clear=HashTrieSet(["group-z/0", "group-z/1", "group-z/2"]),
)

LEDGER = ledger(RESERVED, ADMITTED)
LATER = replace(
    ADMITTED,
    status=PromptGroupStatus.READY_TO_FINALIZE,
    siblings=(
        ADMITTED.siblings[0],
        replace(
            ADMITTED.siblings[1],
            attempts=(
                ADMITTED.siblings[1].attempts[0],
                replace(ADMITTED.siblings[1].attempts[1], status=RolloutAttemptStatus.FAILED),
                RolloutAttemptRecord(
                    index=2,
                    status=RolloutAttemptStatus.SEALED,
                    receipt="5b" * 32,
                    reward=0.0,
                    masked=False,
                    staged_keys=("group-a/1/attempt-2",),
                ),
            ),
        ),
    ),
)


def write(path: Path, value: object) -> str:
    path.write_bytes(encode(value))
    return str(path)


def test_equal_files_print_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", write(tmp_path / "a", FULL), write(tmp_path / "b", FULL)]) == 0
    assert capsys.readouterr().out == ""


def test_states_are_compared_in_the_terms_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", write(tmp_path / "a", FULL), write(tmp_path / "b", CHANGED)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "dispatch index: now 6",
        "open training step: now none",
        "rows to clear: + 1 - 0",
    ]


def test_other_kinds_are_compared_place_by_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write(tmp_path / "a", LEDGER), write(tmp_path / "b", ledger(RESERVED, LATER))]
    assert main(["diff", *files]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        '~ groups.group-a.status: "generating" -> "ready_to_finalize"',
        '~ groups.group-a.siblings.1.attempts.1.status: "dispatched" -> "failed"',
    ]
    assert lines[2].startswith('+ groups.group-a.siblings.1.attempts.2: {"index": 2, "status": ')
    assert lines[2].endswith("...")
    assert len(lines[2]) < 150


def test_json_names_paths_as_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write(tmp_path / "a", CHANGED), write(tmp_path / "b", FULL)]
    assert main(["diff", "--json", *paths]) == 1
    assert json.loads(capsys.readouterr().out)[-1] == {
        "path": ["rows_to_clear", 2],
        "before": "group-z/2",
    }


def test_files_of_two_kinds_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(tmp_path / "a", LEDGER)
    assert main(["diff", other, write(tmp_path / "b", FULL)]) == 2
    assert "RolloutRecoveryLedger" in capsys.readouterr().err


def test_directory_stands_for_the_state_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, state in (("000001", FULL), ("000002", CHANGED)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.safetensors").write_bytes(b"weights")
        write(tmp_path / name / "ledger", LEDGER)
        write(tmp_path / name / "rollout_state.bin", state)
    assert main(["diff", str(tmp_path / "000001"), str(tmp_path / "000002")]) == 1
    assert capsys.readouterr().out.startswith("dispatch index: now 6\n")


def test_directory_without_a_state_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(tmp_path), write(tmp_path / "ledger", LEDGER)]) == 2
    assert "no rollout state" in capsys.readouterr().err


def test_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write(tmp_path / "a", FULL)
    torn = tmp_path / "b"
    torn.write_bytes(encode(FULL)[:-1])
    assert main(["diff", whole, str(torn)]) == 2
    error = capsys.readouterr().err
    assert str(torn) in error
    assert "rollsync inspect" in error
