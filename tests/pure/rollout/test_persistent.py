"""Walking a persistent map: everything once, and the map as it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rpds import HashTrieMap

from rollsync.pure.rollout.persistent import items_of, values_of


@given(st.dictionaries(st.text(), st.integers()))
def test_every_item_comes_once(plain: dict[str, int]) -> None:
    held = HashTrieMap(plain)
    assert sorted(items_of(held)) == sorted(plain.items())
    assert sorted(values_of(held)) == sorted(plain.values())


def test_the_list_is_the_callers_own() -> None:
    held = HashTrieMap({"a": 1, "b": 2})
    items_of(held).clear()
    assert sorted(items_of(held)) == [("a", 1), ("b", 2)]
