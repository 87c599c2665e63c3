"""Workers that meet through a store, and one that does not belong."""

from concurrent.futures import ThreadPoolExecutor

import pytest

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
