"""`rollsync demo`: a whole run that is killed and resumed, and the proof that nothing was lost."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where, and with which engine."""
    parser.add_argument(
        "--generation",
        choices=("vllm", "torch"),
        default="vllm",
        help="the engine that generates rollouts (default: vllm)",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=None,
        help="new run directory (default: runs/demo-DATE-TIME)",
    )


def run(args: argparse.Namespace) -> int:
    """The demo; 1 if the account does not close."""
    from transformers.utils.logging import disable_progress_bar

    from rollsync.shell.cli._console import CommandConsole

    disable_progress_bar()
    console = CommandConsole()
    directory: Path = args.directory or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    return tell(console, directory.absolute(), args.generation)


def tell(console: Console, directory: Path, generation: Literal["vllm", "torch"]) -> int:
    """Tell the story in `directory`, which must not exist; the exit code."""
    from rollsync.shell.config import read_config
    from rollsync.shell.demo import story
    from rollsync.shell.demo.preparation import prepare
    from rollsync.shell.run.display import RunDisplay
    from rollsync.shell.run.saved import JOURNAL, read_saved

    started_s = time.monotonic()
    console.print(f"1. A small Qwen2 model and its configuration, in {directory}")
    config_file = prepare(directory, generation)
    config = read_config(config_file)
    follower = story.JournalFollower(directory / JOURNAL)
    steps = config.grpo.max_steps
    console.print(f"2. A run of {steps} steps, until it is killed inside one")
    with (
        story.running_child(config_file, directory / "first-run.log") as child,
        RunDisplay(console, title="first run") as display,
    ):
        moment = story.KillMoment(from_step=max(2, steps // 3), latest_step=steps - 2)
        step, processes = story.run_until_killed(child, follower, moment, display.show)
    console.print(f"   SIGKILL to {processes} processes inside training step {step}")
    console.print("3. What a resume will do, read from disk (`rollsync explain` shows the same)")
    for line in story.plan_lines(read_saved(directory)):
        console.print(f"   {line}", highlight=False, soft_wrap=True)
    console.print("4. The same command again: it resumes, and finishes")
    with (
        story.running_child(config_file, directory / "second-run.log") as child,
        RunDisplay(console, title="second run") as display,
    ):
        story.run_to_the_end(child, follower, display.show)
    console.print("5. The account, read from disk")
    result, lines = story.account_lines(directory)
    for line in lines:
        console.print(f"   {line}", highlight=False, soft_wrap=True)
    console.print(
        f"   {time.monotonic() - started_s:.0f} s. Look further with:"
        f" rollsync inspect {directory}; rollsync verify {directory}",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if result.closes else 1
