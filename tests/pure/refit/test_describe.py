"""Every error of refit has its own words, and they show what the error holds."""

from __future__ import annotations

from types import UnionType
from typing import get_args, get_type_hints

import msgspec
import pytest

from rollsync.pure.refit import describe, errors

KINDS: tuple[type[errors.RefitErrorValue], ...] = get_args(errors.RefitErrorValue)


def filled(kind: type[errors.RefitErrorValue]) -> errors.RefitErrorValue:
    """An error of that kind with a value of its own in every field."""
    values: dict[str, object] = {}
    for number, (field, hint) in enumerate(get_type_hints(kind).items()):
        choices = get_args(hint)
        if hint is int:
            values[field] = 1000 + number
        elif hint is float:
            values[field] = 0.5 + number
        elif hint is bool:
            values[field] = True
        elif hint is str:
            values[field] = f"<{field}>"
        elif choices and isinstance(choices[0], str):
            values[field] = choices[0]
        elif hint == tuple[int, ...]:
            values[field] = (1000 + number, 2000 + number)
        else:
            values[field] = (f"<{field} 1>", f"<{field} 2>")
    return msgspec.convert(values, kind, strict=True)


def test_the_union_has_every_error() -> None:
    defined = {
        value
        for value in vars(errors).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == errors.__name__
        and not value.__name__.startswith("_")
    } - {msgspec.Struct}
    assert set(KINDS) == defined
    assert isinstance(errors.RefitErrorValue, UnionType)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_worded_with_what_it_holds(kind: type[errors.RefitErrorValue]) -> None:
    error = filled(kind)
    text = describe(error)
    assert text == text.strip()
    for field in kind.__struct_fields__:
        value: object = getattr(error, field)
        if isinstance(value, str) and value.startswith("<"):
            assert value in text, field
        elif isinstance(value, tuple):
            assert str(value[0]) in text, field
    assert (
        any(str(n) in text for n in range(1000, 1010))
        or "<" in text
        or "0.5" in text
        or ("policy" in text)
    )


def test_no_two_errors_have_the_same_words() -> None:
    texts = [describe(filled(kind)) for kind in KINDS]
    assert len(set(texts)) == len(texts)


def test_a_rank_that_two_policy_workers_have_is_put_right_by_the_name_of_its_setting() -> None:
    assert "refit_rank" in describe(errors.RankRepeated(side="policy", group=0, rank=0))
    assert "refit_rank" not in describe(errors.RankRepeated(side="rollout", group=0, rank=0))
