"""Agreement of two sides on one plan, before the first byte of payload.

Each side declares what its plan follows from and hands out the digest of that. Equal digests mean
equal plans; otherwise the declarations themselves are compared, and the first difference is the
error.

Rule kept here: a declaration has everything that decides where a byte lies, the version of the
rules too, and the other side's is only ever compared, never packed: it may be of any size.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec
from msgspec import Struct

from rollsync.pure.refit.buckets import BucketPlan, TensorSpec
from rollsync.pure.refit.errors import (
    BucketSizesDiffer,
    PlanDifference,
    PlanRulesDiffer,
    SentOtherThanDeclared,
    SpecField,
    StreamLengthsDiffer,
    TensorsDiffer,
)

PLAN_VERSION: Final = 1
"""The version of the packing rules in `buckets`: raised when equal tensors may pack otherwise."""


class DeclaredPlan(Struct, frozen=True, kw_only=True):
    """What a bucket plan follows from.

    Attributes:
        plan_version: The version of the packing rules, `PLAN_VERSION` of the side that declares.
        bucket_bytes: Size of a bucket.
        tensors: The tensors in stream order.
    """

    plan_version: int
    bucket_bytes: int
    tensors: tuple[TensorSpec, ...]


def declare(plan: BucketPlan) -> DeclaredPlan:
    """The declaration of a plan that this side has made."""
    return DeclaredPlan(
        plan_version=PLAN_VERSION, bucket_bytes=plan.bucket_bytes, tensors=plan.specs
    )


def plan_digest(declared: DeclaredPlan) -> str:
    """SHA-256 of a declaration, in hexadecimal.

    It is taken over arrays of integers and strings, which MessagePack as msgspec writes it has one
    form for.
    """
    parts = (declared.plan_version, declared.bucket_bytes, declared.tensors)
    return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()


def first_difference(mine: DeclaredPlan, theirs: DeclaredPlan) -> PlanDifference | None:
    """Where two declarations first differ, or None where they are equal."""
    if mine.plan_version != theirs.plan_version:
        return PlanRulesDiffer(mine=mine.plan_version, theirs=theirs.plan_version)
    if mine.bucket_bytes != theirs.bucket_bytes:
        return BucketSizesDiffer(mine_bytes=mine.bucket_bytes, theirs_bytes=theirs.bucket_bytes)
    for index, (my, their) in enumerate(zip(mine.tensors, theirs.tensors, strict=False)):
        difference = _spec_difference(my, their)
        if difference is not None:
            field, my_text, their_text = difference
            return TensorsDiffer(
                index=index, field=field, tensor=my.name, mine=my_text, theirs=their_text
            )
    common = min(len(mine.tensors), len(theirs.tensors))
    longer = max(mine.tensors, theirs.tensors, key=len)
    if len(longer) > common:
        return StreamLengthsDiffer(
            index=common, tensor=longer[common].name, only_mine=len(mine.tensors) > common
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
