"""What saving the rollout state costs, part by part, beside other ways to do the same.

An event on one group is applied to states of 1,000 to 100,000 groups; the cut of a
snapshot, which takes the cell's value and pins the rows, likewise. Both should hardly grow.
"""

from __future__ import annotations

import asyncio
import statistics
import time

import torch
from returns.pipeline import is_successful

from rollsync.pure.rollout.events import RolloutEvent
from rollsync.pure.rollout.state import RolloutState
from rollsync.pure.rollout.transitions import apply
from rollsync.shell.rollout.barrier import DataPlaneCheckpointBarrier
from rollsync.shell.rollout.cell import StateCell
from rollsync.shell.rollout.data_plane import InProcessDataPlane
from tests.bench.measure import figure, machine, write_results
from tests.bench.restore_memory import memory_figures
from tests.bench.rollout_records import record_figures
from tests.bench.rollout_rows import row_figures
from tests.bench.rollout_saves import save_figures
from tests.bench.rollout_throughput import throughput_figures
from tests.pure.rollout.events_kit import admit, dispatch, fresh, reserve, seal

SIZES = (1_000, 10_000, 100_000)
REPETITIONS = 2_000
CUTS = 200
LONGEST_CUT_US = 5_000.0
TOKENS = torch.zeros(4, dtype=torch.int64)


def state_of(groups: int) -> RolloutState:
    """A state with so many admitted groups; the first sibling of the first one is dispatched."""
    state = applied(fresh(), reserve(*range(groups)))
    state = applied(state, admit(state, *range(groups)))
    return applied(state, dispatch("e0p0", 0))


def applied(state: RolloutState, event: RolloutEvent) -> RolloutState:
    """The state after an event that has to be legal."""
    result = apply(state, event)
    if not is_successful(result):
        raise RuntimeError(f"{event} was refused: {result.failure()}")
    return result.unwrap()


def apply_us(state: RolloutState) -> float:
    """Median microseconds of sealing a sibling."""
    event = seal("e0p0", 0)
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        apply(state, event)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


async def cut_us(state: RolloutState) -> float:
    """Median microseconds for which a snapshot's cut holds back every change."""
    barrier = DataPlaneCheckpointBarrier()
    cell, plane = StateCell(state, barrier), InProcessDataPlane()
    keys = [f"e0p{number}/0" for number in range(len(state.ledger.groups))]
    await plane.put("rollouts", {key: {"token_ids": TOKENS} for key in keys})
    times = []
    for _ in range(CUTS):
        async with barrier.checkpoint():
            start = time.perf_counter()
            kept = cell.state
            pinned = plane.pin("rollouts")
            times.append(time.perf_counter() - start)
        pinned.release()
        del kept
    return statistics.median(times) * 1e6


def figures() -> list[dict[str, object]]:
    """Every figure at every size, compared with the smallest size."""
    result: list[dict[str, object]] = []
    first: dict[str, float] = {}
    for size in SIZES:
        state = state_of(size)
        for name, value, goal in (
            ("apply one event", apply_us(state), None),
            ("exclusive cut of a snapshot", asyncio.run(cut_us(state)), 2.0),
        ):
            against = first.setdefault(name, value)
            result.append(
                figure(
                    f"{name}, {size} groups",
                    value,
                    "microseconds",
                    against=(f"{name}, {SIZES[0]} groups", against),
                    goal=goal,
                )
            )
            if goal is not None:
                result.append(
                    figure(
                        f"{name}, {size} groups",
                        value,
                        "microseconds",
                        against=("5 milliseconds", LONGEST_CUT_US),
                        goal=1.0,
                    )
                )
    return result


if __name__ == "__main__":
    write_results(
        {
            "machine": machine(["msgspec", "rpds-py", "torch", "safetensors", "TransferQueue"]),
            "figures": [
                *figures(),
                *record_figures(),
                *row_figures(),
                *save_figures(),
                *throughput_figures(),
                *memory_figures(),
            ],
        }
    )
