"""What is read without the loader, and which offers of it are taken."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.control import OfferedTensor
from rollsync.pure.refit.direct import (
    OfferMistake,
    can_be_read,
    check_offered,
    destinations_digest,
    destinations_of,
    expected_of,
)
from rollsync.pure.refit.load_plan import (
    Copy,
    LoadPlan,
    Region,
    SeenParameter,
    SeenTensor,
    plan_load,
)

WHOLE = Copy(Region(0, 32), "p", Region(0, 32))
CUT = Copy(Region(4, 4, 4, 8), "o", Region(0, 16))
UNEVEN = Copy(Region(0, 8, 2, 16), "u", Region(0, 4, 4, 8))


def plan() -> LoadPlan:
    copies = {"p": (WHOLE,), "o": (CUT,), "u": (UNEVEN,), "elsewhere": ()}
    serving = {"p": SeenParameter("p", 32), "o": SeenParameter("o", 16)}
    gaps = (Region(4, 4, 4, 8),)
    return plan_load(
        {n: SeenTensor(TensorSpec(n, (4, 4), "bfloat16"), c) for n, c in copies.items()},
        {**serving, "u": SeenParameter("u", 36 - 4, zeros=gaps)},
    )


def test_destinations_are_the_direct_tensors_that_can_be_read() -> None:
    assert set(plan().direct) == {"p", "o", "u", "elsewhere"}
    found = destinations_of(plan())
    assert [(each.name, each.regions) for each in found] == [
        ("p", (Region(0, 32),)),
        ("o", (Region(4, 4, 4, 8),)),
        ("elsewhere", ()),
    ]


def test_copies_between_runs_of_different_lengths_are_left_to_the_loader() -> None:
    assert can_be_read(WHOLE)
    assert can_be_read(CUT)
    assert can_be_read(Copy(CUT.source, "x", Region(8, 4, 4, 12)))
    assert not can_be_read(UNEVEN)


def test_the_digest_tells_destinations_apart() -> None:
    found = destinations_of(plan())
    assert destinations_digest(found) == destinations_digest(destinations_of(plan()))
    others = [found[:-1], found[::-1], (replace(found[0], regions=()), *found[1:])]
    assert len({destinations_digest(each) for each in (found, *others)}) == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"name": "u"}, "unknown"),
        ({"name": "o"}, "repeated"),
        ({"size_bytes": 31}, "other size"),
        ({"checksum": None}, "no checksum"),
    ],
)
def test_what_was_not_agreed_on_is_not_read(change: dict[str, object], reason: str | None) -> None:
    known = expected_of(destinations_of(plan()))
    offered = OfferedTensor(name="p", address=4096, size_bytes=32, checksum="00")
    mistake = check_offered(known, {"o"}, replace(offered, **change), checksums=True)
    assert (mistake and mistake.reason) == reason
    assert mistake is None or isinstance(mistake, OfferMistake)
    nothing = OfferedTensor(name="elsewhere", address=0, size_bytes=32, checksum=None)
    assert check_offered(known, set(), nothing, checksums=True) is None
