"""Agreement of two plans: equal digests exactly when equal, and the first difference by name."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.refit import (
    PLAN_VERSION,
    DeclaredPlan,
    TensorSpec,
    check_sent,
    declare,
    describe,
    first_difference,
    plan_buckets,
    plan_digest,
)
from rollsync.pure.refit.errors import (
    BucketSizesDiffer,
    PlanRulesDiffer,
    SentOtherThanDeclared,
    StreamLengthsDiffer,
    TensorsDiffer,
)
from tests.pure.refit.test_buckets import BUCKET_BYTES, streams

BASE = [
    TensorSpec("a", (4, 2), "bfloat16"),
    TensorSpec("b", (300,), "float32", ("tied",)),
    TensorSpec("c", (), "int64"),
]


def plan_of(specs: list[TensorSpec], bucket_bytes: int = 512) -> DeclaredPlan:
    return declare(plan_buckets(specs, bucket_bytes).unwrap())


@given(streams(), streams(), BUCKET_BYTES, BUCKET_BYTES)
def test_digests_are_equal_exactly_when_the_plans_are(
    mine: list[TensorSpec], theirs: list[TensorSpec], my_bytes: int, their_bytes: int
) -> None:
    my, their = plan_of(mine, my_bytes), plan_of(theirs, their_bytes)
    assert (plan_digest(my) == plan_digest(their)) == (my == their)
    assert (first_difference(my, their) is None) == (my == their)
    assert plan_digest(my) == plan_digest(plan_of(list(mine), my_bytes))


@given(streams().filter(bool), st.data(), BUCKET_BYTES)
def test_the_first_tensor_that_differs_is_named(
    specs: list[TensorSpec], data: st.DataObject, bucket_bytes: int
) -> None:
    index = data.draw(st.integers(0, len(specs) - 1))
    spec = specs[index]
    changed = TensorSpec(spec.name, (*spec.shape, 2), spec.dtype)
    mine = plan_of(specs, bucket_bytes)
    theirs = plan_of([*specs[:index], changed, *specs[index + 1 :]], bucket_bytes)
    difference = first_difference(mine, theirs)
    assert isinstance(difference, TensorsDiffer)
    assert (difference.index, difference.tensor, difference.field) == (index, spec.name, "shape")
    assert repr(spec.name) in describe(difference)


@pytest.mark.parametrize(
    ("changed", "field", "mine", "theirs"),
    [
        (TensorSpec("B", (300,), "float32", ("tied",)), "name", "b", "B"),
        (TensorSpec("b", (150, 2), "float32", ("tied",)), "shape", "[300]", "[150, 2]"),
        (TensorSpec("b", (300,), "int32", ("tied",)), "dtype", "float32", "int32"),
        (TensorSpec("b", (300,), "float32"), "aliases", "['tied']", "[]"),
    ],
)
def test_each_field_of_a_tensor_is_compared(
    changed: TensorSpec, field: str, mine: str, theirs: str
) -> None:
    other = plan_of([BASE[0], changed, BASE[2]])
    assert plan_digest(plan_of(BASE)) != plan_digest(other)
    difference = first_difference(plan_of(BASE), other)
    assert isinstance(difference, TensorsDiffer)
    assert (difference.field, difference.mine, difference.theirs) == (field, mine, theirs)
    sent = check_sent(BASE[1], changed)
    assert isinstance(sent, SentOtherThanDeclared)
    assert (sent.tensor, sent.field, sent.declared, sent.sent) == ("b", field, mine, theirs)
    assert "'b'" in describe(sent)
    assert theirs in describe(sent)


def test_what_is_sent_as_declared_is_fine() -> None:
    assert [check_sent(spec, spec) for spec in BASE] == [None, None, None]


def test_one_stream_that_ends_early() -> None:
    short = plan_of(BASE[:2])
    mine = first_difference(plan_of(BASE), short)
    theirs = first_difference(short, plan_of(BASE))
    assert mine == StreamLengthsDiffer(index=2, tensor="c", only_mine=True)
    assert theirs == StreamLengthsDiffer(index=2, tensor="c", only_mine=False)
    assert "other side ends" in describe(mine)
    assert "this side ends" in describe(theirs)


def test_buckets_of_another_size() -> None:
    difference = first_difference(plan_of(BASE, 512), plan_of(BASE, 1024))
    assert difference == BucketSizesDiffer(mine_bytes=512, theirs_bytes=1024)
    assert "1024" in describe(difference)


def test_rules_of_another_version() -> None:
    mine = plan_of(BASE)
    theirs = msgspec.structs.replace(mine, plan_version=PLAN_VERSION + 1)
    assert plan_digest(mine) != plan_digest(theirs)
    difference = first_difference(mine, theirs)
    assert difference == PlanRulesDiffer(mine=PLAN_VERSION, theirs=PLAN_VERSION + 1)
    assert "same rollsync" in describe(difference)


def test_another_sides_declaration_may_be_of_any_size() -> None:
    enormous = TensorSpec("a", (2**62, 2**62), "float64")
    theirs = DeclaredPlan(plan_version=PLAN_VERSION, bucket_bytes=512, tensors=(enormous,))
    difference = first_difference(plan_of(BASE), theirs)
    assert isinstance(difference, TensorsDiffer)
    assert difference.field == "shape"


def test_packing_has_not_changed_since_this_version_of_the_rules() -> None:
    """When this fails, tensors pack otherwise than before: raise `PLAN_VERSION`, then the digest.

    Sides that pack differently must not believe that they agree.
    """
    sizes = (0, 1, 255, 256, 257, 511, 512, 513, 1024, 1025, 5000)
    dtypes = ("int8", "bfloat16", "float32", "complex128")
    specs = [TensorSpec(f"{d}.{n}", (n,), d) for d, n in product(dtypes, sizes)]
    packed = [plan_buckets(specs, bucket_bytes).unwrap() for bucket_bytes in (256, 512, 1 << 14)]
    digest = hashlib.sha256(msgspec.msgpack.encode(packed)).hexdigest()
    assert (PLAN_VERSION, digest) == (
        1,
        "0522a7d383ddc13f2bcae666441359daa5290430b005af5cee56d0079daa2707",
    )


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_the_digest_is_the_same_in_every_process(seed: str) -> None:
    program = (
        "from rollsync.pure.refit import TensorSpec, declare, plan_buckets, plan_digest\n"
        "spec = TensorSpec('b', (300,), 'float32', ('tied',))\n"
        "print(plan_digest(declare(plan_buckets([spec], 512).unwrap())))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == plan_digest(plan_of([BASE[1]]))
