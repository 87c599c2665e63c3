"""A process that has imported everything and forks a child for each order it reads.

So a run that is killed and resumed costs its own time and not that of importing torch. It has one
thread, and computes nothing itself, so that a fork copies no lock that somebody holds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

import msgspec
import torch

from tests.shell.run.child import FAILED, Order, carry_out


def serve() -> None:
    """For each line of standard input: fork a child, and print its exit code in the end."""
    torch.set_num_threads(1)
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        pid = os.fork()
        if pid == 0:
            os._exit(_in_child(order))
        if order.kill_after_s is not None:
            time.sleep(order.kill_after_s)
            # It may have ended, but its id is its own until it is waited for.
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _in_child(order: Order) -> int:
    try:
        return carry_out(order)
    except BaseException:
        traceback.print_exc()
        return FAILED
    finally:
        sys.stderr.flush()


if __name__ == "__main__":
    serve()
