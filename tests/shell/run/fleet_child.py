"""A process that carries on a run and kills by chance: its engines, and now and then itself."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from pathlib import Path

import ray

from rollsync.pure.refit.fleet.state import EnginePhase
from rollsync.shell.config import read_config
from rollsync.shell.journal import EngineChanged, JournalEntry, StepTrained
from rollsync.shell.rollout.errors import WorkersLost
from tests.shell.refit.conftest import ENVIRONMENT
from tests.shell.run.fleet_runs import run_here
from tests.shell.run.killable import ENGINE_MOMENTS, order

ENGINE_KILL, OWN_KILL = 1 / 6, 1 / 1200
"""How probable each is: of an engine after a step, of this process after an entry."""
ENOUGH = 3
"""Engines that a process which comes to the end has seen die."""


class KillByChance:
    """Stops the run after `last_step`, when it has killed enough; until then it kills.

    Args:
        rng: chance.
        orders: where orders to engines go.
        last_step: where the run ends.
        own: whether this process may be killed too.
    """

    def __init__(self, rng: random.Random, orders: Path, *, last_step: int, own: bool) -> None:
        self._rng = rng
        self._orders = orders
        self._last_step = last_step
        self._own = own
        self._pids: dict[str, int] = {}
        self._deaths = 0

    def __call__(self, entry: JournalEntry) -> bool:
        if self._own and self._rng.random() < OWN_KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(entry, EngineChanged):
            if entry.now == EnginePhase.HEALTHY and entry.pid is not None:
                self._pids[entry.engine] = entry.pid
            elif entry.now == EnginePhase.DEAD:
                self._pids.pop(entry.engine, None)
                self._deaths += 1
        if not isinstance(entry, StepTrained):
            return False
        # An order may wait for a set-up, which another engine's death brings about.
        doomed = sum(1 for _ in self._orders.iterdir())
        if len(self._pids) > 1 + doomed and self._rng.random() < ENGINE_KILL:
            self._kill_one()
        return entry.step >= self._last_step and self._deaths >= ENOUGH

    def _kill_one(self) -> None:
        moment = self._rng.choice(ENGINE_MOMENTS)
        if self._rng.random() < 0.5:
            os.kill(self._rng.choice(sorted(self._pids.values())), signal.SIGKILL)
        else:
            order(self._orders, moment)


def main(config_path: str, orders: str, last_step: str, seed: str) -> int:
    """Carry the run on, with chance from `seed`. Every fourth process is not killed."""
    config = read_config(Path(config_path))
    ray.init(
        address=config.cluster.address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": ENVIRONMENT},
    )
    director = KillByChance(
        random.Random(int(seed)),
        Path(orders),
        last_step=int(last_step),
        own=int(seed) % 4 != 3,
    )
    try:
        run_here(config, Path(orders), director)
    except WorkersLost as lost:
        print(lost, file=sys.stderr)
        return lost.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
