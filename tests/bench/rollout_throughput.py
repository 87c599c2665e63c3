"""What a snapshot costs a run: the same run with many snapshots and with none, in turn.

A real run (trainer, torch engine, controller, store) in this process, of a tiny model. Its
time with as many snapshots as it can take, and without any, gives the seconds that one costs; that
over a minute is the throughput lost to one a minute. Equal runs differ by more than snapshots cost,
so the goal is judged on the worst that the measurement allows: the slowest run with snapshots
against the fastest without. The spread of runs without any stands beside it. Both sides write a
trainer checkpoint each step, as a snapshot needs one. The state is as small as the run, so this is
the fixed cost of a snapshot beside a busy run; a larger state costs more, in a thread.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from msgspec.structs import replace

from rollsync.pure.config import MasterConfig
from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.shell.journal import Finished, JournalLine, Resumed, Saved, read_lines
from rollsync.shell.run.saved import JOURNAL
from tests.bench.measure import figure
from tests.shell.run.child import ENDED, Order, carry_out
from tests.shell.run.runs import small_config, write_file

ROUNDS = 3
STEPS = 24
OFTEN_S = 0.05
MINUTE_S = 60.0
MODEL = Path(__file__).parents[1] / "golden" / "run-0.1.0" / "model"


def configured(directory: Path, interval_s: float) -> MasterConfig:
    """The same work, with a trainer checkpoint each step, and a snapshot so often at most."""
    config = small_config(directory, MODEL)
    return replace(
        config,
        data=replace(config.data, size=8 * STEPS),
        grpo=replace(
            config.grpo, num_prompts_per_step=8, num_generations_per_prompt=8, max_steps=STEPS
        ),
        generation=replace(config.generation, max_new_tokens=16),
        checkpointing=replace(
            config.checkpointing, snapshot_interval_s=interval_s, trainer_every_steps=1
        ),
    )


def seconds_and_snapshots(config: MasterConfig) -> tuple[float, int]:
    """How long the run took from its beginning to its end, and how often it was saved meanwhile."""
    if carry_out(Order(config=write_file(config))) != ENDED:
        raise RuntimeError("the run was stopped")
    lines: list[JournalLine] = list(read_lines(Path(config.run.directory) / JOURNAL))
    began_s = next(line.at_s for line in lines if isinstance(line.entry, Resumed))
    ended_s = next(line.at_s for line in lines if isinstance(line.entry, Finished))
    saves = [line.entry for line in lines if isinstance(line.entry, Saved)]
    kind = CheckpointKind.ROLLOUT_SNAPSHOT.value
    return ended_s - began_s, sum(each.saved and each.what == kind for each in saves)


def throughput_figures() -> list[dict[str, object]]:
    """Share of the generated groups that one snapshot a minute costs."""
    often, never = [], []
    with tempfile.TemporaryDirectory() as root:
        for number in range(ROUNDS + 1):
            never.append(seconds_and_snapshots(configured(Path(root, f"n{number}"), 1e6)))
            often.append(seconds_and_snapshots(configured(Path(root, f"o{number}"), OFTEN_S)))
    snapshots = min(count for _, count in often[1:])
    without = sorted(seconds for seconds, _ in never[1:])
    with_many = sorted(seconds for seconds, _ in often[1:])
    without_s, with_s = statistics.median(without), statistics.median(with_many)
    at_most_s = max(0.0, with_many[-1] - without[0]) / snapshots
    return [
        figure(
            f"a run of {STEPS} steps with {snapshots} snapshots, median of {ROUNDS}",
            with_s,
            "seconds",
            against=(f"the same without any, {without_s:.2f} s", without_s),
        ),
        figure(
            "the slowest run without snapshots",
            without[-1],
            "seconds",
            against=(f"the fastest without, {without[0]:.2f} s", without[0]),
        ),
        figure(
            "a minute with one snapshot, at most",
            MINUTE_S + at_most_s,
            "seconds",
            against=(
                f"a minute without, as one snapshot costs at most {at_most_s * 1e3:.1f} ms",
                MINUTE_S,
            ),
            goal=1.01,
        ),
    ]
