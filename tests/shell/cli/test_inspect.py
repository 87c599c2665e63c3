"""`rollsync inspect` on whole files, damaged ones, and directories of both."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
import torch
from rpds import HashTrieSet

from rollsync.codecs import encode
from rollsync.codecs.envelope import seal
from rollsync.pure.snapshot.places import SEGMENTS_DIRECTORY
from rollsync.shell.cli import main
from rollsync.shell.journal import EngineChanged, Journal, Resumed, SyncRetried
from rollsync.shell.rollout.data_plane import StoredRow
from rollsync.shell.rollout.segments import encode_segment
from rollsync.shell.run.saved import JOURNAL
from tests.codecs.samples.rollout_state import FULL

STATE = encode(FULL)


def test_file_is_printed_as_a_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state").write_bytes(STATE)
    assert main(["inspect", str(tmp_path / "state")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rollout.state, version 1"
    assert lines[2:6] == [
        "progress: (3)",
        "  train_steps: 3",
        "  trainer_version: 3",
        "  current_epoch: 1",
    ]
    assert "    group-a: (11)" in lines


def test_json_has_the_header_and_the_whole_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "state"
    path.write_bytes(STATE)
    assert main(["inspect", "--json", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["file"] == {
        "path": str(path),
        "size_bytes": len(STATE),
        "kind": "rollout.state",
        "version": 1,
        "problem": None,
    }
    assert document["value"]["ledger"]["groups"]["group-a"]["status"] == "generating"


def test_long_collections_are_cut_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = msgspec.structs.replace(FULL, rows_to_clear=HashTrieSet(f"row-{n}" for n in range(25)))
    (tmp_path / "state").write_bytes(encode(long))
    assert main(["inspect", str(tmp_path / "state")]) == 0
    assert "  ... and 5 more; --json prints all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (STATE[:-1], "should have"),
        (STATE[:-1] + b"\xff", "damaged"),
        (STATE[:20], "too few"),
        (seal("rollout.state", 9, b""), "newer rollsync"),
        (seal("rollout.unheard-of", 1, b""), "unknown kind"),
        (b"something else", "not a rollsync file"),
    ],
    ids=["cut", "changed", "beginning", "newer", "unknown", "other"],
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_damaged_file_is_described_and_is_the_answer_no(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    data: bytes,
    words: str,
    flags: list[str],
) -> None:
    (tmp_path / "file").write_bytes(data)
    assert main(["inspect", *flags, str(tmp_path / "file")]) == 1
    assert words in capsys.readouterr().out


def test_directory_lists_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "snapshots" / "000001").mkdir(parents=True)
    (tmp_path / "snapshots" / "000001" / "state").write_bytes(STATE)
    (tmp_path / "rows.safetensors").write_bytes(b"tensors" * 1000)
    assert main(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"file{' ' * 18}  bytes  kind           version",
        f"rows.safetensors{' ' * 6}   7000  other",
        f"snapshots/000001/state  {len(STATE):>5}  rollout.state        1",
    ]


def test_rows_are_listed_by_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = StoredRow({"tokens": torch.tensor([1, 2, 3])}, {"task": "décompte"})
    data = encode_segment({"group-a/0": row, "group-a/1": row})
    path = tmp_path / SEGMENTS_DIRECTORY / sha256(data).hexdigest()
    path.parent.mkdir()
    path.write_bytes(data)
    assert main(["inspect", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[:7] == [
        f"row segment, {len(data)} bytes, 2 rows",
        "group-a/0: (2)",
        "  tags: (1)",
        '    task: "décompte"',
        "  tensors: (1)",
        '    tokens: "I64 [3]"',
        "group-a/1: (2)",
    ]
    assert main(["inspect", "--json", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["file"]["kind"], document["file"]["problem"]) == ("row segment", None)
    assert document["value"]["group-a/1"] == {
        "tags": {"task": "décompte"},
        "tensors": {"tokens": "I64 [3]"},
    }
    state = path.with_name("0" * 64)
    state.write_bytes(STATE)
    assert main(["inspect", "--json", str(tmp_path)]) == 0
    kinds = [summary["kind"] for summary in json.loads(capsys.readouterr().out)]
    assert sorted(kinds) == ["rollout.state", "row segment"]


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"x" * 9])
def test_damaged_rows_are_the_answer_no(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[bytes], bytes]
) -> None:
    data = encode_segment({"group-a/0": StoredRow({"tokens": torch.tensor([1, 2, 3])}, {})})
    path = tmp_path / sha256(data).hexdigest()
    path.write_bytes(damage(data))
    assert main(["inspect", str(path)]) == 1
    assert "it is not what its name says" in capsys.readouterr().out


def test_what_only_has_the_name_of_rows_is_the_answer_no(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / sha256(b"anything").hexdigest()
    path.write_bytes(b"anything")
    assert main(["inspect", "--json", str(path)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert "no rows can be read from it" in document["file"]["problem"]
    assert document["value"] == {}


def test_directory_with_a_damaged_file_is_the_answer_no(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good").write_bytes(STATE)
    (tmp_path / "torn").write_bytes(STATE[:100])
    assert main(["inspect", "--json", str(tmp_path)]) == 1
    summaries = json.loads(capsys.readouterr().out)
    assert [(summary["path"], summary["problem"] is None) for summary in summaries] == [
        ("good", True),
        ("torn", False),
    ]


def test_path_that_is_not_there_is_an_error_to_put_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path / "missing")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_an_empty_lock_file_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "writer.lock").touch()
    assert main(["inspect", str(tmp_path)]) == 0
    (tmp_path / "manifest.bin").touch()
    assert main(["inspect", str(tmp_path)]) == 1


def test_a_journal_is_told_in_words_and_a_run_directory_tells_of_its_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path / JOURNAL)
    journal.write(Resumed(train_steps=0, source=None))
    journal.write(Resumed(train_steps=3, source="step_000003", refused=("step_000004: torn",)))
    journal.write(
        EngineChanged(
            engine="engine-1",
            was="healthy",
            now="dead",
            why="it did not answer 6 probes",
            weight_version=None,
            pid=17,
            host="node-b",
        )
    )
    journal.write(SyncRetried(weight_version=3, why="engine-1 is gone"))
    journal.close()
    engines = [
        "engine  engine-1 is dead, was healthy, process 17 on node-b: it did not answer 6 probes",
        "sync    weight version 3 is tried again: engine-1 is gone",
    ]
    assert main(["inspect", str(tmp_path / JOURNAL)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "start   a fresh run",
        "resume  passed over step_000004: torn",
        "resume  from step_000003, after step 3",
        *engines,
    ]
    assert main(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == engines
    assert main(["inspect", "--json", str(tmp_path / JOURNAL)]) == 0
    entries = json.loads(capsys.readouterr().out)
    kinds = [entry["type"] for entry in entries]
    assert kinds == ["resumed", "resumed", "engine_changed", "sync_retried"]
