"""`rollsync diff` on equal files, different ones, and files that cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from rpds import HashTrieSet

from rollsync.codecs import encode
from rollsync.shell.cli import main
from tests.codecs.samples import SAMPLES
from tests.codecs.samples.rollout_state import FULL

CHANGED = msgspec.structs.replace(
    FULL,
    sampler_dispatch_index=6,
    open_step=None,
    rows_to_clear=HashTrieSet(["group-z/0", "group-z/1", "group-z/2"]),
)


def write(path: Path, value: object) -> str:
    path.write_bytes(encode(value))
    return str(path)


def test_equal_files_print_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", write(tmp_path / "a", FULL), write(tmp_path / "b", FULL)]) == 0
    assert capsys.readouterr().out == ""


def test_each_difference_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", write(tmp_path / "a", FULL), write(tmp_path / "b", CHANGED)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "~ sampler_dispatch_index: 5 -> 6",
        '~ open_step: {"step": 4, "group_ids": ["group-d", "group-c"], '
        '"optimizer_commit_open": false} -> null',
        '+ rows_to_clear.2: "group-z/2"',
    ]


def test_json_names_paths_as_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write(tmp_path / "a", CHANGED), write(tmp_path / "b", FULL)]
    assert main(["diff", "--json", *paths]) == 1
    assert json.loads(capsys.readouterr().out)[-1] == {
        "path": ["rows_to_clear", 2],
        "before": "group-z/2",
    }


def test_long_values_are_shortened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = msgspec.structs.replace(FULL, rows_to_clear=HashTrieSet(["x" * 500]))
    assert main(["diff", write(tmp_path / "a", long), write(tmp_path / "b", FULL)]) == 1
    assert all(len(line) < 150 for line in capsys.readouterr().out.splitlines())


def test_files_of_two_kinds_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = write(tmp_path / "a", SAMPLES["rollout.recovery-ledger"]["full"])
    assert main(["diff", ledger, write(tmp_path / "b", FULL)]) == 2
    assert "RolloutRecoveryLedger" in capsys.readouterr().err


def test_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write(tmp_path / "a", FULL)
    torn = tmp_path / "b"
    torn.write_bytes(encode(FULL)[:-1])
    assert main(["diff", whole, str(torn)]) == 2
    error = capsys.readouterr().err
    assert str(torn) in error
    assert "rollsync inspect" in error
