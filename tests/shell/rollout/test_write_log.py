"""A pinned log says which rows were written since, whatever is written, cleared or tidied later."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollsync.shell.rollout.data_plane.write_log import PinnedLog, WriteLog

WRITES = st.lists(
    st.tuples(
        st.sets(st.integers(0, 40).map(str), min_size=1), st.sets(st.integers(0, 40).map(str))
    )
)


@given(WRITES)
def test_every_row_written_since_is_named(writes: list[tuple[set[str], set[str]]]) -> None:
    """Each step writes some keys and then clears some."""
    log, held = WriteLog(), set[str]()
    written: list[set[str]] = []
    pins: list[tuple[PinnedLog, set[str]]] = [(log.pin(), set())]
    for put, cleared in writes:
        held |= put
        log.note(sorted(put), held=held)
        written.append(set(put))
        pins.append((log.pin(), set(held)))
        held -= cleared
    for earlier, (first, _) in enumerate(pins):
        for later in range(earlier, len(pins)):
            second, there = pins[later]
            since = set().union(*written[earlier:later])
            assert since & there <= second.since(first.writes) <= since


def test_a_row_that_was_written_again_is_named_by_its_last_write_when_the_log_is_tidied() -> None:
    log = WriteLog()
    log.note(["again", "once"], held=["again", "once"])
    log.note(["again"], held=["again", "once"])
    cleared = [f"cleared {number}" for number in range(68)]
    log.note(cleared, held=["again", "once", *cleared])
    log.note(["new"], held=["again", "once", "new"])
    assert len(log._entries) == 3, "tidied: the log has forgotten what was cleared"
    tidied = log.pin()
    assert tidied.since(1) == {"again", "once", "new"}
    assert tidied.since(2) == {"again", "new"}
    assert tidied.since(3) == {"new"}


def test_a_log_is_no_longer_than_its_rows_ask_for() -> None:
    log, tidied = WriteLog(), 0
    for number in range(10_000):
        before = log._entries
        log.note([str(number % 10)], held=[str(each) for each in range(10)])
        tidied += log._entries is not before
    assert tidied <= 10_000 / 64, "hardly ever, so that a write costs the same on the whole"
    assert len(log.pin().since(0)) == 10
    assert len(log._entries) <= 2 * 10 + 64
