"""What can go wrong in the decisions of refit, as values.

Rule kept here: each kind of mistake is a frozen struct of its own that holds what a person needs
to see. `rollsync.pure.refit.describe` puts them into words; nothing here is an exception.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Side = Literal["policy", "rollout"]
"""Which half of a run: the trainer's workers or the generation engines'."""

SpecField = Literal["name", "shape", "dtype", "aliases"]
"""What a `TensorSpec` says about a tensor."""


Planned = Literal[
    "policy workers", "rollout workers", "layers", "experts", "tensors", "bytes", "parts"
]
"""What a plan is made of, so many and no more."""


class _Error(Struct, frozen=True, kw_only=True, tag=True):
    pass


# Bucket plan


class BucketSizeUnaligned(_Error, frozen=True, kw_only=True):
    """A bucket size that is not a positive multiple of the alignment."""

    bucket_bytes: int
    alignment_bytes: int


class TensorNamedTwice(_Error, frozen=True, kw_only=True):
    """A tensor whose name, or one of whose aliases, came before in the stream."""

    tensor: str
    aliases: tuple[str, ...]


class UnknownDtype(_Error, frozen=True, kw_only=True):
    """A tensor of an element type whose size is not known."""

    tensor: str
    dtype: str


class NegativeDimension(_Error, frozen=True, kw_only=True):
    """A tensor with a dimension below zero."""

    tensor: str
    shape: tuple[int, ...]


PlanError = BucketSizeUnaligned | TensorNamedTwice | UnknownDtype | NegativeDimension

# Agreement of two plans


class PlanRulesDiffer(_Error, frozen=True, kw_only=True):
    """The two sides pack by rules of different versions."""

    mine: int
    theirs: int


class BucketSizesDiffer(_Error, frozen=True, kw_only=True):
    """The two sides use buckets of different sizes."""

    mine_bytes: int
    theirs_bytes: int


class StreamLengthsDiffer(_Error, frozen=True, kw_only=True):
    """One side's stream goes on where the other's ends."""

    index: int
    tensor: str
    only_mine: bool


class TensorsDiffer(_Error, frozen=True, kw_only=True):
    """The first tensor in which the two plans differ."""

    index: int
    field: SpecField
    tensor: str
    mine: str
    theirs: str


PlanDifference = PlanRulesDiffer | BucketSizesDiffer | StreamLengthsDiffer | TensorsDiffer


class SentOtherThanDeclared(_Error, frozen=True, kw_only=True):
    """A tensor arrives in another dtype or shape, or under another name, than was declared."""

    tensor: str
    field: SpecField
    declared: str
    sent: str


# Settings, and bucket size


class RatioNotANumber(_Error, frozen=True, kw_only=True):
    """The configured ratio is no int or float."""

    setting: str
    value: str


class RatioOutOfRange(_Error, frozen=True, kw_only=True):
    """The configured ratio is not strictly between 0 and 1."""

    setting: str
    value: float


class NoMemoryReported(_Error, frozen=True, kw_only=True):
    """No worker of one side said how much memory it has."""

    side: Side


class MemoryNotPositive(_Error, frozen=True, kw_only=True):
    """A worker reported that it has no memory."""

    side: Side
    worker: int
    total_bytes: int


class BucketTooSmall(_Error, frozen=True, kw_only=True):
    """The ratio leaves less than a MiB of the smallest worker's memory."""

    setting: str
    ratio: float
    side: Side
    worker: int
    total_bytes: int


class TimeoutRefused(_Error, frozen=True, kw_only=True):
    """A configured number of seconds that cannot be waited for."""

    setting: str
    value: str
    longest_s: float


class MemoryNotANumber(_Error, frozen=True, kw_only=True):
    """A worker reported its memory as something else than a number of bytes."""

    side: Side
    reported: str


RatioError = RatioNotANumber | RatioOutOfRange
BucketSizeError = NoMemoryReported | MemoryNotPositive | MemoryNotANumber | BucketTooSmall

# Metadata of the workers


class RankNotAnInteger(_Error, frozen=True, kw_only=True):
    """An item of metadata whose rank is no integer."""

    side: Side
    group: int
    position: int
    rank: str


class RankMissing(_Error, frozen=True, kw_only=True):
    """Some items of a group have a rank, and this one has none."""

    side: Side
    group: int
    position: int


class RankRepeated(_Error, frozen=True, kw_only=True):
    """Two workers of a group report the same rank."""

    side: Side
    group: int
    rank: int


class RankGap(_Error, frozen=True, kw_only=True):
    """Ranks of a group are to be 0 to n-1, and this one is missing."""

    side: Side
    group: int
    rank: int
    group_size: int


class GroupSizesDiffer(_Error, frozen=True, kw_only=True):
    """A data-parallel group has another number of workers than group 0."""

    group: int
    group_size: int
    first_group_size: int


class WorldSizeDiffers(_Error, frozen=True, kw_only=True):
    """Another number of workers answered than the world size that was declared."""

    side: Side
    declared: int
    answered: int


class RankBeyondWorld(_Error, frozen=True, kw_only=True):
    """A rollout rank that the world has no place for."""

    rank: int
    world_size: int


MetadataError = (
    RankNotAnInteger | RankMissing | RankRepeated | RankGap | GroupSizesDiffer | WorldSizeDiffers
)

# Routes


class EmptyWorld(_Error, frozen=True, kw_only=True):
    """A side with no worker."""

    side: Side
    world_size: int


class SitesIncomplete(_Error, frozen=True, kw_only=True):
    """Hosts or shards are not given for every worker of a side."""

    side: Side
    world_size: int
    given: int


class EnginesUneven(_Error, frozen=True, kw_only=True):
    """Engines among which the rollout workers cannot be shared evenly."""

    rollout_workers: int
    engines: int


RouteError = EmptyWorld | SitesIncomplete | EnginesUneven

# Destination layout


class UnknownTensor(_Error, frozen=True, kw_only=True):
    """A rank wants a part of a tensor that the policy does not send."""

    rank: int
    tensor: str


class PartOutOfBounds(_Error, frozen=True, kw_only=True):
    """A rank wants a part that reaches out of its tensor."""

    rank: int
    tensor: str
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]


class PartsOverlap(_Error, frozen=True, kw_only=True):
    """A rank wants some bytes of a tensor twice."""

    rank: int
    tensor: str


class TensorNotCovered(_Error, frozen=True, kw_only=True):
    """Some elements of a tensor are held by no rank."""

    tensor: str
    elements: int
    held: int


LayoutError = UnknownTensor | PartOutOfBounds | PartsOverlap | TensorNotCovered


class TooManyLayouts(_Error, frozen=True, kw_only=True):
    """A sender's buffers are too small to be shared by the different layouts that it feeds."""

    layouts: int
    buffer_bytes: int


# Parallel layout of a model


class WorldNotDivisible(_Error, frozen=True, kw_only=True):
    """The rollout world does not divide into groups of tensor x pipeline parallel ranks."""

    rollout_world_size: int
    tensor_parallel: int
    pipeline_parallel: int


class SizeNotPositive(_Error, frozen=True, kw_only=True):
    """A parallel size below 1."""

    what: str
    size: int


class ExpertGroupsUneven(_Error, frozen=True, kw_only=True):
    """The expert-parallel size is no multiple of the tensor-parallel size, or does not divide
    the ranks of one pipeline stage over all data-parallel groups."""

    expert_parallel: int
    tensor_parallel: int
    stage_ranks: int


class DimensionNotDivisible(_Error, frozen=True, kw_only=True):
    """A tensor cannot be cut into equal slices."""

    tensor: str
    dimension: int
    size: int
    parts: int


class TooFewLayers(_Error, frozen=True, kw_only=True):
    """There are more pipeline stages than layers."""

    layers: int
    pipeline_parallel: int


class HeadsNotDivisible(_Error, frozen=True, kw_only=True):
    """The attention heads of a layer cannot be dealt to the tensor-parallel ranks."""

    heads: int
    kv_heads: int
    tensor_parallel: int


class TooFewExperts(_Error, frozen=True, kw_only=True):
    """There are more ranks to share the experts of a layer than experts; none, in a dense model."""

    experts: int
    expert_parallel: int


class BeyondPlanning(_Error, frozen=True, kw_only=True):
    """More of something than a plan is made for; see `plan_limits`."""

    what: Planned
    size: int
    most: int


ParallelError = (
    WorldNotDivisible
    | SizeNotPositive
    | ExpertGroupsUneven
    | DimensionNotDivisible
    | HeadsNotDivisible
    | TooFewLayers
    | TooFewExperts
    | BeyondPlanning
)

# What was learned of a loader


class OtherPartsRead(_Error, frozen=True, kw_only=True):
    """A loader read other parts of a tensor than those that are sent since it was watched."""

    tensor: str


# Shapes from a configuration


class UnknownArchitecture(_Error, frozen=True, kw_only=True):
    """A model type whose tensors cannot be derived from its configuration."""

    model_type: str
    known: tuple[str, ...]


class ConfigMalformed(_Error, frozen=True, kw_only=True):
    """A field of the configuration is missing, or of another type or range."""

    why: str


class HeaderMalformed(_Error, frozen=True, kw_only=True):
    """A safetensors header that does not say what a header says."""

    why: str


ShapesError = UnknownArchitecture | ConfigMalformed | HeaderMalformed | BeyondPlanning

# Life cycle


class EventRefused(_Error, frozen=True, kw_only=True):
    """The table has no transition for this event in this state."""

    phase: str
    event: str


class NotConnected(_Error, frozen=True, kw_only=True):
    """An update was to begin before its transport was connected."""

    phase: str


class AnotherVersion(_Error, frozen=True, kw_only=True):
    """An update ends under another version than it began with."""

    updating: int
    finished: int


LifecycleError = EventRefused | NotConnected | AnotherVersion


class ServesNothing(_Error, frozen=True, kw_only=True):
    """The engine has no complete weights to generate with."""

    phase: str
    cause: str


class ServesAnotherVersion(_Error, frozen=True, kw_only=True):
    """The engine's complete weights are of another version than was asked for."""

    serving: int
    wanted: int


ServingError = ServesNothing | ServesAnotherVersion

RefitErrorValue = (
    PlanError
    | PlanDifference
    | SentOtherThanDeclared
    | RatioError
    | TimeoutRefused
    | BucketSizeError
    | MetadataError
    | RankBeyondWorld
    | RouteError
    | LayoutError
    | TooManyLayouts
    | ParallelError
    | OtherPartsRead
    | ShapesError
    | LifecycleError
    | ServingError
)
