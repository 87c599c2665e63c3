"""A process that forks children one after another, each of which resumes a run and saves it again
and again, until it is killed. So a kill does not cost another import of everything.

A child prints the number of each save once that is published. Every fourth save is a checkpoint.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from rollsync.shell.store import SnapshotStore
from tests.shell.store.kit import save_checkpoint, save_snapshot, store_at

ENDED = "ended with "


def save_for_ever(root: Path) -> None:
    """Does not return."""
    store: SnapshotStore = store_at(root)
    bundle = store.choose().bundle
    save, step = (0, 0) if bundle is None else saved_at(bundle.path, bundle.facts.mutation_version)
    while True:
        save += 1
        # As large as several writes, so that a kill may come in the middle.
        rows = (str(save).encode() * 40000, str(save - 1).encode() * 40000)
        if save % 4 == 0:
            step += 1
            save_checkpoint(store, step, save, *rows)
        else:
            # A state that is whole after each checkpoint, with what has changed since.
            chain = tuple(
                f"state {link}".encode() * 9000 for link in range(save // 4 * 4, save + 1)
            )
            save_snapshot(store, step, save, *rows, chain=chain)
        os.write(1, f"{save}\n".encode())
        store.prune()


def saved_at(path: Path, save: int) -> tuple[int, int]:
    """The save's number, and the step that it was made at."""
    anchor = path if path.name.startswith("step_") else path.parent.parent
    return save, int(anchor.name.removeprefix("step_")) if anchor.name != "bootstrap" else 0


def serve(root: Path) -> None:
    """For each line of standard input: fork a child, which prints its process id and its saves, and
    print in the end `ENDED` with its exit code."""
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                os.write(1, f"{os.getpid()}\n".encode())
                save_for_ever(root)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        os.write(1, f"{ENDED}{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
