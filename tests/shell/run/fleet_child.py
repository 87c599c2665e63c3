"""A process that carries on a run and kills by chance: its engines, and at last what the run hangs
on."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from enum import StrEnum
from pathlib import Path

import msgspec
import ray

from rollsync.pure.refit.fleet.state import EnginePhase
from rollsync.shell.config import read_config
from rollsync.shell.journal import EngineChanged, JournalEntry, StepTrained
from rollsync.shell.rollout.errors import WorkersLost
from tests.shell.actor_processes import QUEUE_CONTROLLER, QUEUE_STORAGE, actor_processes
from tests.shell.conftest import ENVIRONMENT
from tests.shell.run.fleet_runs import run_here
from tests.shell.run.killable import ENGINE_MOMENTS, KillablePolicy, order

ENGINE_KILL = 1 / 6
"""How probable it is that an engine is killed after a step."""
ENOUGH = 3
"""Engines that a process which comes to the end has seen die."""


class Doom(StrEnum):
    """What is killed and ends a process's part of the run."""

    CONTROLLER = "controller"
    TRAINER = "trainer"
    QUEUE_STORAGE = "a storage actor of the data plane"
    QUEUE_CONTROLLER = "the controller of the data plane"


_ACTORS = {
    Doom.TRAINER: (KillablePolicy.__name__,),
    Doom.QUEUE_STORAGE: QUEUE_STORAGE,
    Doom.QUEUE_CONTROLLER: QUEUE_CONTROLLER,
}


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is to do."""

    config: str
    orders: str
    last_step: int
    seed: int
    doom: Doom | None
    """None: it goes on to the last step."""
    doom_step: int
    """It comes after this many steps of this process, or, if 0, while the run starts."""
    doom_delay_s: float
    """And so much later: at whatever the run is then."""


class KillByChance:
    """Kills engines, and stops the run after the last step when it has killed enough.

    Args:
        life: what this process is to do.
        doom: has the end of it come.
    """

    def __init__(self, life: Life, doom: Callable[[], None]) -> None:
        self._life = life
        self._doom = doom
        self._steps = 0
        self._rng = random.Random(life.seed)
        self._orders = Path(life.orders)
        self._pids: dict[str, int] = {}
        self._deaths = 0

    def __call__(self, entry: JournalEntry) -> bool:
        if isinstance(entry, EngineChanged):
            if entry.now == EnginePhase.HEALTHY and entry.pid is not None:
                self._pids[entry.engine] = entry.pid
            elif entry.now == EnginePhase.DEAD:
                self._pids.pop(entry.engine, None)
                self._deaths += 1
        if not isinstance(entry, StepTrained):
            return False
        self._steps += 1
        if self._steps == self._life.doom_step:
            self._doom()
        # An order may wait for a set-up, which another engine's death brings about.
        doomed = sum(1 for _ in self._orders.iterdir())
        if len(self._pids) > 1 + doomed and self._rng.random() < ENGINE_KILL:
            self._kill_one()
        ended = entry.step >= self._life.last_step and self._deaths >= ENOUGH
        return ended and self._life.doom is None

    def _kill_one(self) -> None:
        moment = self._rng.choice(ENGINE_MOMENTS)
        if self._rng.random() < 0.5:
            os.kill(self._rng.choice(sorted(self._pids.values())), signal.SIGKILL)
        else:
            order(self._orders, moment)


def meet(doom: Doom | None, left: Collection[int]) -> None:
    """Kill what it names, or else as soon as it is there.

    Args:
        left: processes of the life before, which Ray has not ended yet.
    """
    pids = [os.getpid()] if doom is Doom.CONTROLLER else []
    while not pids:
        time.sleep(0.05)
        pids = [pid for pid in _processes(doom) if pid not in left]
    os.kill(pids[0], signal.SIGKILL)


def _processes(doom: Doom | None) -> list[int]:
    """On the cluster, which is the parent process's."""
    return [] if doom is None else actor_processes(os.getppid(), _ACTORS.get(doom, ()))


def main(life: Life) -> int:
    """Carry the run on."""
    config = read_config(Path(life.config))
    ray.init(
        address=config.cluster.address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": ENVIRONMENT},
    )
    doomed = threading.Timer(life.doom_delay_s, meet, [life.doom, _processes(life.doom)])
    doomed.daemon = True
    if life.doom is not None and life.doom_step == 0:
        doomed.start()
    director = KillByChance(life, doomed.start if life.doom is not None else lambda: None)
    try:
        run_here(config, Path(life.orders), director)
    except WorkersLost as lost:
        print(f"{type(lost).__name__}: {lost}", file=sys.stderr)
        return lost.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Life)))
