"""A change between looking and waiting is not missed, and every waiter is woken."""

from __future__ import annotations

import asyncio

import pytest

from rollsync.shell.rollout.waiting import ChangeSignal


@pytest.mark.asyncio
async def test_a_change_after_looking_ends_the_wait_at_once() -> None:
    changes = ChangeSignal()
    seen = changes.version
    changes.notify()
    waiting = asyncio.ensure_future(changes.wait_past(seen))
    await asyncio.sleep(0)
    assert waiting.done()


@pytest.mark.asyncio
async def test_one_change_wakes_all_who_wait() -> None:
    changes = ChangeSignal()
    waiting = [asyncio.ensure_future(changes.wait_past(changes.version)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    changes.notify()
    await asyncio.gather(*waiting)


@pytest.mark.asyncio
async def test_a_waiter_waits_for_a_change_later_than_what_it_saw() -> None:
    changes = ChangeSignal()
    changes.notify()
    waiting = asyncio.ensure_future(changes.wait_past(changes.version + 1))
    await asyncio.sleep(0)
    changes.notify()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done(), "that was the change it had seen coming"
    changes.notify()
    await waiting


@pytest.mark.asyncio
async def test_a_cancelled_waiter_leaves_the_others_waiting() -> None:
    changes = ChangeSignal()
    gone, staying = (asyncio.ensure_future(changes.wait_past(0)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    changes.notify()
    await staying
    assert gone.cancelled()
