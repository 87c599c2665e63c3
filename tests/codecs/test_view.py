"""Views show values in a fixed order, and changes name each place that differs."""

from __future__ import annotations

import msgspec
import pytest
from rpds import HashTrieMap, HashTrieSet, Queue

from rollsync.codecs.view import Change, changes, view
from tests.codecs.samples import SAMPLES
from tests.codecs.samples.rollout_state import FULL


def test_persistent_collections_become_sorted_json_data() -> None:
    value = {
        "map": HashTrieMap({"b": HashTrieSet(["y", "x"]), "a": HashTrieSet()}),
        "steps": HashTrieMap({10: 1, 9: 2}),
        "queue": Queue([2, 1]),
        "bytes": b"\x00",
    }
    assert msgspec.json.encode(view(value)) == (
        b'{"map":{"a":[],"b":["x","y"]},"steps":{"9":2,"10":1},"queue":[2,1],"bytes":"AA=="}'
    )


@pytest.mark.parametrize("kind", SAMPLES)
def test_every_kind_has_a_view_that_is_json(kind: str) -> None:
    for value in SAMPLES[kind].values():
        assert msgspec.json.decode(msgspec.json.encode(view(value))) == view(value)


def test_what_is_no_value_has_no_view() -> None:
    with pytest.raises(TypeError, match="no view of object"):
        view(object())


def test_equal_views_have_no_changes() -> None:
    assert list(changes(view(FULL), view(FULL))) == []


def test_every_place_is_named_once() -> None:
    before = {"a": 1, "b": [1, {"c": 2}, 3], "d": None, "e": True, "same": [0]}
    after = {"a": 1.5, "b": [1, {"c": 3}], "e": 1, "same": [0], "f": None}
    assert list(changes(before, after)) == [
        Change(path=("a",), before=1, after=1.5),
        Change(path=("b", 1, "c"), before=2, after=3),
        Change(path=("b", 2), before=3),
        Change(path=("d",), before=None),
        Change(path=("e",), before=True, after=1),
        Change(path=("f",), after=None),
    ]
