"""The errors of refit in words: what is wrong and, where there is one, the way out.

Rule kept here: every error has its own sentence; mypy finds one that was forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from rollsync.pure.refit import errors as e

_RANKS_COME_FROM: Mapping[e.Side, str] = {
    "policy": (
        "give each policy worker its own refit_rank, from 0; where it is not set, it is that of"
        " torch.distributed, and 0 without one"
    ),
    "rollout": "check how the ranks of an engine are assigned",
}
"""What to do about wrong ones."""


_PLAN_BOTH_SIDES = (
    "divide both sides by one number, and what each worker sends, holds and takes stays the same"
)
_CHECK_THE_FILE = "is the file that of a model?"
_PLAN_LESS: Mapping[e.Planned, str] = {
    "policy workers": _PLAN_BOTH_SIDES,
    "rollout workers": _PLAN_BOTH_SIDES,
    "layers": _CHECK_THE_FILE,
    "experts": _CHECK_THE_FILE,
    "tensors": _CHECK_THE_FILE,
    "bytes": _CHECK_THE_FILE,
    "parts": "choose smaller tensor-parallel and expert-parallel sizes",
}
"""What to do about more than a plan is made for."""


def describe(error: e.RefitErrorValue) -> str:
    """One or two sentences for a person."""
    if isinstance(error, e.PlanError):
        return _plan(error)
    if isinstance(error, e.PlanDifference | e.SentOtherThanDeclared):
        return _agreement(error)
    if isinstance(error, e.RatioError | e.TimeoutRefused | e.BucketSizeError):
        return _settings(error)
    if isinstance(error, e.MetadataError | e.RankBeyondWorld | e.RouteError):
        return _workers(error)
    if isinstance(error, e.LayoutError | e.TooManyLayouts | e.OtherPartsRead):
        return _layout(error)
    if isinstance(error, e.ParallelError):
        return _parallel(error)
    if isinstance(error, e.UnknownArchitecture | e.ConfigMalformed | e.HeaderMalformed):
        return _model(error)
    return _lifecycle(error)


def _plan(error: e.PlanError) -> str:
    match error:
        case e.BucketSizeUnaligned():
            return (
                f"a bucket of {error.bucket_bytes} bytes cannot be packed: give a positive "
                f"multiple of {error.alignment_bytes} bytes"
            )
        case e.TensorNamedTwice():
            names = " or ".join(repr(name) for name in (error.tensor, *error.aliases))
            return (
                f"{names} comes twice in the stream of weights: send each tensor once, and name "
                "tied weights as aliases of one tensor"
            )
        case e.UnknownDtype():
            return (
                f"tensor {error.tensor!r} has the dtype {error.dtype!r}, which is no torch dtype: "
                "send it under torch's own name, such as 'bfloat16'"
            )
        case e.NegativeDimension():
            return (
                f"tensor {error.tensor!r} has the shape {list(error.shape)}: "
                "a dimension cannot be negative"
            )
        case _:
            assert_never(error)


def _agreement(error: e.PlanDifference | e.SentOtherThanDeclared) -> str:
    match error:
        case e.PlanRulesDiffer():
            return (
                f"this side packs weights by version {error.mine} of the rules and the other by "
                f"version {error.theirs}: install the same rollsync on both sides"
            )
        case e.BucketSizesDiffer():
            return (
                f"this side's buckets have {error.mine_bytes} bytes and the other's "
                f"{error.theirs_bytes}: give both sides the same bucket size"
            )
        case e.StreamLengthsDiffer():
            other = "the other side ends" if error.only_mine else "this side ends"
            return (
                f"{other} before tensor {error.index}, {error.tensor!r}: both sides must list the "
                "same tensors, so check that they run the same model and the same rollsync"
            )
        case e.TensorsDiffer():
            return (
                f"tensor {error.index}, {error.tensor!r}, is the first whose {error.field} differs:"
                f" {error.mine} on this side, {error.theirs} on the other; "
                "check that both sides run the same model and the same rollsync"
            )
        case e.SentOtherThanDeclared():
            return (
                f"tensor {error.tensor!r} was declared with {error.field} {error.declared} and is "
                f"sent with {error.sent}: declare what is sent, or convert it before sending"
            )
        case _:
            assert_never(error)


def _settings(error: e.RatioError | e.TimeoutRefused | e.BucketSizeError) -> str:
    match error:
        case e.RatioNotANumber():
            return (
                f"{error.setting} is {error.value}: give a number between 0 and 1, such as 0.05,"
                " and no text, which YAML takes 5e-2 for"
            )
        case e.RatioOutOfRange():
            return (
                f"{error.setting} is {error.value}: give a number strictly between 0 and 1, "
                "such as 0.05"
            )
        case e.TimeoutRefused():
            return (
                f"{error.setting} is {error.value}: give a positive number of seconds, at most"
                f" {error.longest_s:g}"
            )
        case e.NoMemoryReported():
            return f"no {error.side} worker reported its memory: is any of them running?"
        case e.MemoryNotPositive():
            return (
                f"{error.side} worker {error.worker} reported {error.total_bytes} bytes of memory: "
                "it sees no device, or measured the wrong one"
            )
        case e.MemoryNotANumber():
            return (
                f"a {error.side} worker reported its total memory as {error.reported}: answer"
                " checkpoint_engine_total_memory_bytes with a number of bytes"
            )
        case e.BucketTooSmall():
            return (
                f"{error.setting} {error.ratio} of the {error.total_bytes} bytes of "
                f"{error.side} worker {error.worker} is less than one MiB: raise the ratio"
            )
        case _:
            assert_never(error)


def _workers(error: e.MetadataError | e.RankBeyondWorld | e.RouteError) -> str:
    match error:
        case e.RankNotAnInteger():
            return (
                f"{_place(error.side, error.group)}: item {error.position} has the rank "
                f"{error.rank}; a worker must report its rank as an integer"
            )
        case e.RankMissing():
            return (
                f"{_place(error.side, error.group)}: item {error.position} has no rank, others "
                "have one; all workers or none must report it"
            )
        case e.RankRepeated():
            return (
                f"{_place(error.side, error.group)}: rank {error.rank} is reported twice; two "
                f"workers believe to be the same one, so {_RANKS_COME_FROM[error.side]}"
            )
        case e.RankGap():
            return (
                f"{_place(error.side, error.group)}: no worker reported rank {error.rank}, though "
                f"{error.group_size} answered; ranks must run from 0 without a gap"
            )
        case e.GroupSizesDiffer():
            return (
                f"data-parallel group {error.group} has {error.group_size} workers and group 0 has "
                f"{error.first_group_size}: all groups must have the same parallel layout"
            )
        case e.WorldSizeDiffers():
            return (
                f"{error.answered} {error.side} workers answered, and {error.declared} were "
                "declared: declare as many as run, or find out which did not start"
            )
        case e.RankBeyondWorld():
            return (
                f"rollout rank {error.rank} does not exist in a world of {error.world_size}: "
                "check the rank prefix and the declared world size"
            )
        case e.EmptyWorld():
            return f"the {error.side} side has {error.world_size} workers: it needs at least one"
        case e.SitesIncomplete():
            return (
                f"sites are given for {error.given} of {error.world_size} {error.side} workers: "
                "give one for each"
            )
        case e.EnginesUneven():
            return (
                f"{error.rollout_workers} rollout workers cannot be shared evenly by"
                f" {error.engines} engines: give every data-parallel engine equally many workers"
            )
        case _:
            assert_never(error)


def _place(side: e.Side, group: int) -> str:
    return "policy workers" if side == "policy" else f"data-parallel group {group}"


def _layout(error: e.LayoutError | e.TooManyLayouts | e.OtherPartsRead) -> str:
    match error:
        case e.UnknownTensor():
            return (
                f"rollout rank {error.rank} wants tensor {error.tensor!r}, which the policy does "
                "not send: check that both sides run the same model"
            )
        case e.PartOutOfBounds():
            return (
                f"rollout rank {error.rank} wants {list(error.sizes)} elements from "
                f"{list(error.starts)} of tensor {error.tensor!r}, whose shape is "
                f"{list(error.shape)}: check that both sides run the same model"
            )
        case e.PartsOverlap():
            return (
                f"rollout rank {error.rank} wants some bytes of tensor {error.tensor!r} twice: "
                "its parts must not overlap"
            )
        case e.TensorNotCovered():
            return (
                f"of the {error.elements} elements of tensor {error.tensor!r} the rollout ranks "
                f"hold {error.held}: a rank of the engine did not report what it keeps"
            )
        case e.TooManyLayouts():
            return (
                f"a policy worker feeds {error.layouts} different layouts, too many for buffers of "
                f"{error.buffer_bytes} bytes: give it larger buffers, or run more policy workers"
            )
        case e.OtherPartsRead():
            return (
                f"the engine's loader read other parts of {error.tensor!r} than in the sync before:"
                " run the sync again, which will be whole"
            )
        case _:
            assert_never(error)


def _parallel(error: e.ParallelError) -> str:
    match error:
        case e.WorldNotDivisible():
            return (
                f"{error.rollout_world_size} rollout workers do not divide into engines of "
                f"{error.tensor_parallel} tensor-parallel x {error.pipeline_parallel} "
                "pipeline-parallel ranks: give a multiple"
            )
        case e.SizeNotPositive():
            return f"{error.what} is {error.size}: it must be at least 1"
        case e.ExpertGroupsUneven():
            return (
                f"{error.expert_parallel} ranks cannot share the experts: the expert-parallel size "
                f"has to be a multiple of the tensor-parallel size {error.tensor_parallel}, and "
                f"the {error.stage_ranks} rollout workers of a pipeline stage a multiple of it; "
                "change one of these"
            )
        case e.DimensionNotDivisible():
            return (
                f"tensor {error.tensor!r} cannot be cut into {error.parts} equal slices: its "
                f"dimension {error.dimension} has {error.size} elements; "
                "choose another tensor-parallel size"
            )
        case e.TooFewLayers():
            return (
                f"{error.pipeline_parallel} pipeline stages are more than the {error.layers} "
                "layers: choose fewer stages"
            )
        case e.HeadsNotDivisible():
            return (
                f"{error.heads} attention heads, and {error.kv_heads} of keys and "
                f"values, cannot be dealt to {error.tensor_parallel} ranks: choose a "
                "tensor-parallel size that divides the first, and divides the second or is a "
                "multiple of it"
            )
        case e.TooFewExperts():
            if not error.experts:
                return (
                    f"the expert-parallel size is {error.expert_parallel}, and the model has no "
                    "experts to share: leave it at 1"
                )
            return (
                f"{error.experts} experts cannot be shared by {error.expert_parallel} ranks: "
                "choose an expert-parallel size that is no larger"
            )
        case e.BeyondPlanning():
            return (
                f"{error.size:,} {error.what} are more than the {error.most:,} that a plan is made "
                f"for: {_PLAN_LESS[error.what]}"
            )
        case _:
            assert_never(error)


def _model(error: e.UnknownArchitecture | e.ConfigMalformed | e.HeaderMalformed) -> str:
    match error:
        case e.UnknownArchitecture():
            return (
                f"the shapes of model type {error.model_type!r} are not known (known: "
                f"{', '.join(error.known)}): give the model's safetensors files instead"
            )
        case e.ConfigMalformed():
            return f"not a usable model configuration: {error.why}"
        case e.HeaderMalformed():
            return f"not a usable safetensors header: {error.why}"
        case _:
            assert_never(error)


def _lifecycle(error: e.LifecycleError | e.ServingError) -> str:
    match error:
        case e.EventRefused():
            return f"an engine that is {error.phase} cannot take {error.event}"
        case e.NotConnected():
            return (
                f"the {error.phase} engine has given back its transport: connect again before "
                "the next update"
            )
        case e.AnotherVersion():
            return (
                f"an update to version {error.updating} cannot finish as version {error.finished}"
            )
        case e.ServesNothing():
            cause = f" ({error.cause})" if error.cause else ""
            return (
                f"the engine is {error.phase}{cause} and has no complete weights to generate with: "
                "sync the weights first"
            )
        case e.ServesAnotherVersion():
            return (
                f"the engine serves weight version {error.serving}, and version {error.wanted} is "
                "wanted: sync the weights first"
            )
        case _:
            assert_never(error)
