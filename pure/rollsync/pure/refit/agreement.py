"""Agreement of two sides on one plan, before the first byte of payload.

Each side derives the plan from what it knows and hands out its digest. Equal digests mean equal
plans; otherwise the plans themselves are compared, and the first difference is the error.

Rule kept here: the digest covers everything that decides where a byte lies, and the version of the
rules by which it was decided.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from rollsync.pure.refit.buckets import BucketPlan, Placement, TensorSpec
from rollsync.pure.refit.errors import (
    BucketSizesDiffer,
    PlanDifference,
    SentOtherThanDeclared,
    SpecField,
    StreamLengthsDiffer,
    TensorsDiffer,
)

PLAN_VERSION: Final = 1
"""The version of the packing rules in `buckets`: raised when equal specs may pack otherwise."""


def plan_digest(plan: BucketPlan) -> str:
    """SHA-256, in hexadecimal, of the plan and of the version of its rules.

    Every part is an array of integers and strings, which MessagePack as msgspec writes it has one
    form for.
    """
    parts = (PLAN_VERSION, plan.bucket_bytes, plan.placements, plan.filled_bytes)
    return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()


def first_difference(mine: BucketPlan, theirs: BucketPlan) -> PlanDifference | None:
    """Where two plans first differ in stream order, or None where they are equal."""
    if mine.bucket_bytes != theirs.bucket_bytes:
        return BucketSizesDiffer(mine_bytes=mine.bucket_bytes, theirs_bytes=theirs.bucket_bytes)
    for index, (my, their) in enumerate(zip(mine.placements, theirs.placements, strict=False)):
        if my != their:
            return _placement_difference(index, my, their)
    common = min(len(mine.placements), len(theirs.placements))
    longer = max(mine.placements, theirs.placements, key=len)
    if len(longer) > common:
        return StreamLengthsDiffer(
            index=common,
            tensor=longer[common].spec.name,
            only_mine=len(mine.placements) > common,
        )
    return None


def check_sent(declared: TensorSpec, sent: TensorSpec) -> SentOtherThanDeclared | None:
    """What is wrong with a tensor of the stream that was declared before, or None."""
    difference = _spec_difference(declared, sent)
    if difference is None:
        return None
    field, was_declared, was_sent = difference
    return SentOtherThanDeclared(
        tensor=declared.name, field=field, declared=was_declared, sent=was_sent
    )


def _placement_difference(index: int, mine: Placement, theirs: Placement) -> TensorsDiffer:
    difference = _spec_difference(mine.spec, theirs.spec)
    if difference is None:
        return TensorsDiffer(
            index=index,
            field="chunks",
            tensor=mine.spec.name,
            mine=str([list(msgspec.structs.astuple(chunk)) for chunk in mine.chunks]),
            theirs=str([list(msgspec.structs.astuple(chunk)) for chunk in theirs.chunks]),
        )
    field, my, their = difference
    return TensorsDiffer(index=index, field=field, tensor=mine.spec.name, mine=my, theirs=their)


def _spec_difference(mine: TensorSpec, theirs: TensorSpec) -> tuple[SpecField, str, str] | None:
    """The first field in which two specs differ, and both sides of it in words."""
    if mine.name != theirs.name:
        return "name", mine.name, theirs.name
    if mine.shape != theirs.shape:
        return "shape", str(list(mine.shape)), str(list(theirs.shape))
    if mine.dtype != theirs.dtype:
        return "dtype", mine.dtype, theirs.dtype
    if mine.aliases != theirs.aliases:
        return "aliases", str(list(mine.aliases)), str(list(theirs.aliases))
    return None
