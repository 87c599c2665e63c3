"""A call that may never return is waited for as long as its caller likes."""

from __future__ import annotations

import threading

import pytest

from rollsync.shell.refit.beside import answered_in, begun
from rollsync.shell.refit.errors import RefitError


def test_what_a_call_answers_or_raises_reaches_who_waits() -> None:
    def fail() -> None:
        raise TimeoutError("its own")

    assert answered_in(60, begun(lambda: 7), who="it has not answered", setting="timeout_s") == 7
    with pytest.raises(TimeoutError, match="its own"):
        answered_in(60, begun(fail), who="it has not answered", setting="timeout_s")


def test_a_call_that_does_not_return_is_given_up_by_name() -> None:
    never = begun(threading.Event().wait)
    with pytest.raises(RefitError, match=r"^it has not answered within 0\.01 s .*raise timeout_s"):
        answered_in(0.01, never, who="it has not answered", setting="timeout_s")
    assert not never.done()
