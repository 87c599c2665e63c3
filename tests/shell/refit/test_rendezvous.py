"""Workers that meet through a store, and one that does not belong."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollsync.shell.refit import rendezvous
from rollsync.shell.refit.errors import RefitError
from rollsync.shell.refit.rendezvous import Rendezvous

SECRET = b"the run's"


def meet(worker: int, port: int, secret: bytes = SECRET) -> list[object]:
    return Rendezvous("127.0.0.1", port, secret, timeout_s=20).exchange(worker, 3, {"rank": worker})


def test_every_worker_gets_the_metadata_of_all_in_order() -> None:
    keeper = Rendezvous("127.0.0.1", 0, SECRET, timeout_s=20, keeper=True)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(meet, worker, keeper.port) for worker in (2, 1)]
        answers = [keeper.exchange(0, 3, {"rank": 0}), *(other.result() for other in others)]
    assert answers == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_metadata_without_the_secret_is_refused() -> None:
    keeper = Rendezvous("127.0.0.1", 0, SECRET, timeout_s=20, keeper=True)
    with ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(meet, 1, keeper.port, b"another run's")
        with pytest.raises(RefitError, match="worker 1"):
            keeper.exchange(0, 2, {"rank": 0})
        with pytest.raises(RefitError, match="worker 0"):
            stranger.result()


def test_a_worker_that_does_not_come_is_not_waited_for_for_ever() -> None:
    keeper = Rendezvous("127.0.0.1", 0, SECRET, timeout_s=0.2, keeper=True)
    with pytest.raises(RefitError, match=r"worker 1, 2 of 3 .* within 0.2 s .*rollout_world_size"):
        keeper.exchange(0, 3, {"rank": 0})


def test_a_wait_ends_by_what_its_caller_learns_meanwhile() -> None:
    def hear() -> None:
        raise ValueError("the other side refused")

    keeper = Rendezvous("127.0.0.1", 0, SECRET, timeout_s=250, keeper=True)
    with pytest.raises(ValueError, match="refused"):
        keeper.exchange(0, 2, {"rank": 0}, meanwhile=hear)


def test_who_waits_for_others_hears_that_the_keeper_is_gone() -> None:
    keeper = Rendezvous("127.0.0.1", 0, SECRET, timeout_s=250, keeper=True)
    port = keeper.port
    kept = [keeper]
    del keeper
    with pytest.raises(RefitError, match="trainer rank 0 is gone"):
        Rendezvous("127.0.0.1", port, SECRET, timeout_s=250).exchange(
            1, 2, {"rank": 1}, meanwhile=kept.clear
        )


KEEPER = """
import sys
from rollsync.shell.refit.rendezvous import Rendezvous
keeper = Rendezvous("127.0.0.1", 0, b"the run's", timeout_s=60, keeper=True)
print(keeper.port, flush=True)
sys.stdin.read()
"""


def test_a_keeper_that_is_halted_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither by who has met it already, nor by who comes then."""
    monkeypatch.setattr(rendezvous, "_LAST_WORDS_S", 0.1)
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with keeper:
        assert keeper.stdout is not None
        port = int(keeper.stdout.readline())
        met = Rendezvous("127.0.0.1", port, SECRET, timeout_s=0.3)
        keeper.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(RefitError, match=r"trainer rank 0, who keeps .* within 0\.4 s"):
                met.exchange(1, 2, {"rank": 1})
            with pytest.raises(RefitError, match=r"trainer rank 0, who keeps .* within 0\.4 s"):
                Rendezvous("127.0.0.1", port, SECRET, timeout_s=0.3)
        finally:
            keeper.kill()


def word(listener: Rendezvous, update: int) -> str:
    """What is left for it there, as soon as it has come."""
    while (why := listener.failure_of(update)) is None:
        time.sleep(0.01)
    return why


def test_word_of_a_failed_update_is_that_updates_and_of_who_knows_the_secret() -> None:
    keeper = Rendezvous("127.0.0.1", 0, SECRET, timeout_s=20, keeper=True)
    other = Rendezvous("127.0.0.1", keeper.port, SECRET, timeout_s=20)
    assert other.failure_of(1) is None
    keeper.tell_failure(1, "ValueError: no update today")
    assert word(other, 1) == "ValueError: no update today"
    assert other.failure_of(2) is None
    stranger = Rendezvous("127.0.0.1", keeper.port, b"another run's", timeout_s=20)
    stranger.tell_failure(2, "give up")
    assert word(stranger, 2) == "give up"
    assert other.failure_of(2) is None
