"""Whatever lies where a file or a directory of a run belongs: every command says so in words.

A traceback, or a command that waits for a pipe to be written to, would be a failure here.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rollsync.pure.config import RetentionConfig, dataset_digest
from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.shell.cli import main
from rollsync.shell.config import read_config
from rollsync.shell.errors import RollsyncError
from rollsync.shell.journal import Journal
from rollsync.shell.run.saved import CONFIG, JOURNAL, write_config
from rollsync.shell.store import RealFileSystem, SnapshotStore, collect, examine
from tests.shell.store.failing import FailingFileSystem
from tests.shell.store.kit import facts, save_snapshot

Capture = pytest.CaptureFixture[str]
GOLDEN = Path(__file__).parents[2] / "golden" / "run-0.1.0" / "run"
SNAPSHOT = "step_000001/snapshots/000001"
SEGMENT = min((GOLDEN / "segments").iterdir()).name
NEEDED = (
    "bootstrap",
    "bootstrap/anchor.bin",
    "segments",
    f"segments/{SEGMENT}",
    "step_000001",
    "step_000001/manifest.bin",
    "step_000001/policy",
    "step_000001/rollout_state.bin",
    "step_000001/snapshots",
    SNAPSHOT,
    f"{SNAPSHOT}/manifest.bin",
    f"{SNAPSHOT}/rollout_state.bin",
    CONFIG,
    JOURNAL,
)
"""What a resume or a command reads."""
NEW = ("step_000009", f"{SNAPSHOT[:-1]}2", "writer.lock")
"""Names of ours that nothing has yet."""


def make_file(path: Path) -> None:
    path.write_bytes(b"other\n")


def make_directory(path: Path) -> None:
    (path / "inner").mkdir(parents=True)


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def link_to_a_directory(path: Path) -> None:
    # Within the test's own directory: a save follows the link.
    elsewhere = Path(*path.parts[: path.parts.index("run")], "elsewhere")
    elsewhere.mkdir()
    path.symlink_to(elsewhere)


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # A socket's whole path has to be short.
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


ODDITIES: tuple[Callable[[Path], None], ...] = (
    make_file,
    make_directory,
    link_to_nothing,
    link_to_itself,
    link_to_a_directory,
    make_socket,
    make_pipe,
)


HARMLESS = (
    ("writer.lock", make_file),
    # As if no snapshot had been saved yet.
    *((f"{SNAPSHOT[:-7]}", odd) for odd in (make_directory, link_to_nothing, link_to_a_directory)),
)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    shutil.copytree(GOLDEN, root)
    return root


def put(root: Path, place: str, odd: Callable[[Path], None]) -> None:
    path = root / place
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    odd(path)


def looking(root: Path) -> list[list[str]]:
    directory = str(root)
    return [
        ["gc", "--dry-run", directory],
        ["inspect", directory],
        ["explain", directory],
        ["diff", f"{directory}/{SNAPSHOT}", f"{directory}/step_000001"],
    ]


def said(arguments: list[str], capsys: Capture) -> tuple[int, str]:
    """Exit code and all output of a command, which has to say something."""
    code = main(arguments)
    captured = capsys.readouterr()
    assert code in (0, 1, 2), arguments
    assert (captured.err != "") == (code == 2), arguments
    text = captured.out + captured.err
    assert text, arguments
    assert "Traceback" not in text
    return code, text


@pytest.mark.parametrize("odd", ODDITIES, ids=lambda odd: odd.__name__)
@pytest.mark.parametrize("place", [*NEEDED, *NEW])
def test_what_has_another_type_is_said(
    place: str, odd: Callable[[Path], None], run_directory: Path, capsys: Capture
) -> None:
    put(run_directory, place, odd)
    code, text = said(["verify", str(run_directory)], capsys)
    assert code == (0 if (place, odd) in HARMLESS else 1), text
    for arguments in looking(run_directory):
        said(arguments, capsys)
    said(["inspect", str(run_directory / place)], capsys)
    assert said(["verify", str(run_directory / place / "inner")], capsys)[0] == 2


def test_a_bundle_that_is_a_file_is_said_to_be_none_and_once(run_directory: Path) -> None:
    put(run_directory, SNAPSHOT, make_file)
    report = examine(run_directory, RealFileSystem())
    problems = {each.path: each.problem for each in report.bundles if each.problem}
    assert problems == {SNAPSHOT: "it is no directory"}
    put(run_directory, "step_000001", make_file)
    report = examine(run_directory, RealFileSystem())
    assert {each.path: each.problem for each in report.bundles} == {
        "step_000001": "it is no directory"
    }
    assert not any("step_000001" in each for each in report.problems)


def test_a_file_with_a_checkpoints_name_keeps_nothing_from_being_collected(
    run_directory: Path, capsys: Capture
) -> None:
    put(run_directory, "step_000009", make_file)
    left = run_directory / "step_000001" / "snapshots" / ".draft-0-000002"
    left.mkdir()
    code, text = said(["gc", str(run_directory)], capsys)
    assert code == 0, text
    assert not left.exists()
    assert (run_directory / "step_000009").exists(), "nothing newer is whole"


def test_an_old_file_with_a_checkpoints_name_goes_with_its_turn(
    run_directory: Path, capsys: Capture
) -> None:
    (run_directory / "step_000001").rename(run_directory / "step_000002")
    put(run_directory, "step_000001", make_file)
    config = read_config(run_directory / CONFIG)
    store = SnapshotStore(run_directory, config=config, dataset_digest=dataset_digest(config.data))
    save_snapshot(store, 0, 7)
    draft = store.begin(CheckpointKind.TRAINER_CHECKPOINT, 3)
    draft.publish(facts(CheckpointKind.TRAINER_CHECKPOINT, 3), {"rollout_state.bin": b""})
    store.close()
    code, text = said(["gc", "--trainer-checkpoints=1", str(run_directory)], capsys)
    assert code == 0, text
    assert "step_000001" in text
    assert not (run_directory / "step_000001").exists()


@pytest.mark.parametrize("odd", ODDITIES, ids=lambda odd: odd.__name__)
@pytest.mark.parametrize("place", [*NEEDED, *NEW])
def test_a_run_that_meets_it_resumes_from_what_is_whole_or_says_why_not(
    place: str, odd: Callable[[Path], None], run_directory: Path
) -> None:
    config = read_config(run_directory / CONFIG)
    put(run_directory, place, odd)
    store = SnapshotStore(run_directory, config=config, dataset_digest=dataset_digest(config.data))
    expected = (RollsyncError, OSError)
    with suppress(*expected):
        chosen = store.choose()
        assert chosen.bundle is not None
        assert chosen.bundle.read("rollout_state.bin")
    for step in (0, 1):
        with suppress(*expected):
            assert save_snapshot(store, step, 7, b"rows").is_dir()
    store.close()
    with suppress(*expected):
        write_config(config)
        Journal(run_directory / JOURNAL).close()


@pytest.mark.parametrize("name", [b"\xff\xfe", b"line\nend", b"\x1b[31m", "ä".encode(), b" "])
def test_names_that_are_no_text_are_shown(
    name: bytes, run_directory: Path, capsys: Capture
) -> None:
    for directory in ("", "bootstrap", "segments", "step_000001", "step_000001/policy", SNAPSHOT):
        with open(os.path.join(os.fsencode(run_directory / directory), name), "wb") as file:
            file.write(b"other")
    code, text = said(["verify", str(run_directory)], capsys)
    assert code == 0
    assert text.count("not in the manifest") == 3
    for arguments in [*looking(run_directory), ["gc", str(run_directory)]]:
        code, text = said(arguments, capsys)
        assert code in (0, 1)
        assert "\x1b" not in text


def test_a_run_directory_with_such_a_name_works(run_directory: Path, capsys: Capture) -> None:
    other = Path(os.fsdecode(os.fsencode(run_directory.parent) + b"/\xff[red]"))
    run_directory.rename(other)
    for arguments in looking(other):
        code, text = said(arguments, capsys)
        assert code in (0, 1), text


UNREADABLE = (
    ("list_directory", "bootstrap/snapshots$"),
    ("list_directory", "bootstrap$"),
    ("list_directory", "segments$"),
    ("list_directory", "step_000001$"),
    ("list_directory", "step_000001/snapshots$"),
    ("list_directory", "policy$"),
    ("list_directory", f"{SNAPSHOT}$"),
    ("read", "anchor.bin"),
    ("read", "manifest.bin"),
    ("read", SEGMENT),
    ("read", "generators.safetensors"),
)


@pytest.mark.parametrize(("call", "where"), UNREADABLE)
def test_what_cannot_be_read_is_a_problem_and_not_an_end(
    call: str, where: str, run_directory: Path
) -> None:
    (run_directory / "bootstrap" / "snapshots").mkdir(exist_ok=True)
    fs = FailingFileSystem((call, where))
    report = examine(run_directory, fs)
    assert fs.failed
    assert not report.is_whole
    told = [*report.problems, *(each.problem for each in report.bundles if each.problem)]
    assert any("Input/output error" in each for each in told)
    if call == "list_directory":
        named = {each.partition(" cannot be listed: ")[0] for each in told}
        assert any(re.search(where, each) for each in named), named
    assert not any("Errno" in each for each in told)
    assert len(set(told)) == len(told) or call == "read"
    before = [path for path in run_directory.rglob("*") if path.is_file()]
    with suppress(OSError):
        collect(run_directory, fs, RetentionConfig(), dry_run=False)
    assert all(path.exists() for path in before)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("verify", "cannot be listed: No such file or directory"),
        ("gc", "cannot be listed: No such file or directory"),
        ("explain", "is no run directory: it has no config.json"),
        ("inspect", "No such file or directory"),
    ],
)
def test_a_path_that_is_not_there_is_named_once(
    command: str, words: str, tmp_path: Path, capsys: Capture
) -> None:
    code, text = said([command, str(tmp_path / "missing")], capsys)
    assert code == 2
    assert words in text
    assert text.count("missing") == 1
