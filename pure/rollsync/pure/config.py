"""The whole configuration of a run, as one frozen value, and the combinations it may not have.

A file is decoded strictly into `MasterConfig` (unknown keys and wrong types are refused with the
dotted path); what no type can say is checked here, once, by `impossible`. Rule kept here: a value
of a checked `MasterConfig` is never checked again.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated, Literal

from msgspec import Meta, Struct, json
from returns.pipeline import is_successful

from rollsync.pure.refit.describe import describe
from rollsync.pure.refit.fleet.state import FleetSettings
from rollsync.pure.refit.patience import REFIT_TIMEOUT, refit_timeout
from rollsync.pure.rollout.resume import MAX_ATTEMPTS, MAX_RECOVERIES
from rollsync.pure.rollout.sampler import CustomSampler, InOrderSampler, SamplerConfig
from rollsync.pure.rollout.state import RecoveryGranularity

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Natural = Annotated[int, Meta(ge=0, le=2**31 - 1)]
# The upper bounds keep out infinity, which YAML can write.
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Amount = Annotated[float, Meta(ge=0, le=1e6)]
Name = Annotated[str, Meta(min_length=1)]
Scalar = str | int | float | bool


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the run lives and what makes it repeatable."""

    directory: Name
    """Run directory: anchors, checkpoints, snapshots and segments."""
    seed: Natural = 0
    """Seed of the prompt order and of every generation."""
    deterministic: bool = False
    """One torch thread and deterministic kernels, so that equal runs give equal bits."""
    address: Name | None = None
    """Moved to `cluster.address`; null is read because configurations of old runs have it."""


class DataConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prompts. `task` is a reasoning-gym dataset; its options go to it as they are."""

    task: Name
    size: Count
    """Samples in the dataset."""
    seed: Natural = 0
    options: dict[str, Scalar] = {}
    max_epochs: Count = 1
    """How often the dataset is handed out before the prompts end."""


def dataset_digest(config: DataConfig) -> str:
    """Identity of a dataset, hexadecimal: what decides its samples, and not how often they come."""
    decisive = {
        "task": config.task,
        "size": config.size,
        "seed": config.seed,
        "options": config.options,
    }
    return sha256(json.encode(decisive, order="deterministic")).hexdigest()


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy's starting point."""

    path: Name
    """Directory in Hugging Face's format: config, safetensors, tokenizer."""
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the model's files. A run notes it in its `config.json`; where a configuration has
    one, the run starts with no other model."""


class GrpoConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Group-relative policy optimization."""

    num_prompts_per_step: Count
    num_generations_per_prompt: Annotated[int, Meta(ge=2)]
    """Siblings per prompt; the advantage is relative to them, so at least two."""
    max_steps: Count
    learning_rate: Positive
    clip_ratio: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    max_grad_norm: Positive = 1.0
    data_parallel_size: Count = 1
    """Policy workers. Each holds the whole model and trains its share of a step's groups; their
    gradients are added up."""


class GenerationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines that generate rollouts."""

    backend: Literal["vllm", "torch"]
    max_new_tokens: Count
    temperature: Positive = 1.0
    engines: Count = 1
    """Data-parallel engines."""
    max_model_len: Count = 128
    """Longest prompt and completion, in tokens."""
    max_concurrent_requests: Count = 64
    """Requests under way at once, over all engines."""
    fleet: FleetSettings = FleetSettings()
    """When an engine counts as lost, and with how few the run goes on."""


class CheckpointEngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights travel; the shape is NeMo-RL's, so that a configuration fits both."""

    backend: Name = "shm"
    """A built-in engine's name, or `module:ClassName`."""
    update_weights_bucket_memory_ratio: Annotated[float, Meta(ge=1e-9, lt=1)] = 0.01
    """A smaller share would be less than the smallest bucket of any machine there is."""
    engine_kwargs: dict[str, dict[str, Scalar]] = {}


class RetentionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many saves stay. What a resume may need is kept whatever these say."""

    trainer_checkpoints: Count = 2
    snapshots_per_checkpoint: Count = 2


class CheckpointingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the run is saved."""

    trainer_every_steps: Count = 1
    snapshot_interval_s: Seconds = 60.0
    max_consecutive_failures: Count = 3
    """Failed snapshots in a row (I/O errors, timeouts) that the run puts up with."""
    save_timeout_s: Seconds = 300.0
    checkpoint_must_save_by_s: Seconds | None = None
    """Seconds after the start by which a last snapshot is saved; then the run stops. Where the
    step has no trainer checkpoint, one is saved first, after the step that is being trained."""
    retention: RetentionConfig = RetentionConfig()


class RecoveryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of unfinished work after an error or a crash."""

    granularity: RecoveryGranularity = RecoveryGranularity.SIBLING
    max_attempts: Count = MAX_ATTEMPTS
    """Failed attempts of a sibling, counted across resumes, after which its group is dropped."""
    max_recoveries: Count = MAX_RECOVERIES
    """Resumes that may find a group running without progress before it is dropped."""
    load_replay_buffer: bool = True
    """False: a resume generates finished but untrained groups again."""
    replacement_reserve: Natural = 0
    """Spare prompts kept to replace dropped groups."""


class WorkerResources(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What Ray reserves for one worker, on one node."""

    cpus: Amount = 1.0
    gpus: Amount = 0.0
    custom: dict[Name, Positive] = {}
    """Further resources, by the name that the cluster's nodes declare."""


class ClusterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the run's processes are. The controller is where the command is started."""

    address: Name | None = None
    """`host:port` or `auto`, of the Ray cluster that this machine belongs to; None starts Ray on
    this machine alone."""
    policy_worker: WorkerResources = WorkerResources()
    generation_engine: WorkerResources = WorkerResources()
    strategy: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    """On as few nodes as possible, or on as many; `strict_`: on one node, or each on its own, and
    else the run does not start."""
    deadline_s: Seconds = 120.0
    """Longest wait for these resources."""
    collective_timeout_s: Seconds = 600.0
    """Longest that a policy worker waits for the others, when they meet and in a step."""


class InProcessPlaneConfig(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="backend",
    tag="in_process",
):
    """Rows in the controller's memory."""


class TransferQueuePlaneConfig(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="backend",
    tag="transfer_queue",
):
    """Rows in a TransferQueue that the run starts on its Ray cluster."""

    storage: Literal["simple", "ray"] = "simple"
    """`simple`: storage actors of the queue's own, over the nodes; `ray`: Ray's object store."""
    storage_units: Count = 2
    """Storage actors of `simple`; each has a CPU to itself."""
    node_resource: Name | None = None
    """Custom resource of the nodes that `simple` stores on; None: all nodes."""
    deadline_s: Seconds = 60.0
    """Longest wait for the queue to start, and for each of its answers."""


DataPlaneConfig = InProcessPlaneConfig | TransferQueuePlaneConfig


class MasterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that `rollsync run` reads from a configuration file."""

    run: RunConfig
    data: DataConfig
    model: ModelConfig
    grpo: GrpoConfig
    generation: GenerationConfig
    sampler: SamplerConfig
    checkpoint_engine: CheckpointEngineConfig = CheckpointEngineConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    cluster: ClusterConfig = ClusterConfig()
    data_plane: DataPlaneConfig = InProcessPlaneConfig()
    buffer_capacity: Count | None = None
    """Most groups admitted and untrained at once; None: as many as the sampler needs."""


class ImpossibleSetting(Struct, frozen=True, kw_only=True):
    """A combination of settings that cannot work."""

    path: str
    """Dotted path of the setting to change."""
    reason: str


def impossible(config: MasterConfig) -> tuple[ImpossibleSetting, ...]:
    """Every combination in `config` that cannot work, with the setting to change."""
    found: list[ImpossibleSetting] = []

    def refuse(path: str, reason: str) -> None:
        found.append(ImpossibleSetting(path=path, reason=reason))

    if config.run.address is not None:
        refuse("run.address", "it has moved; give it as cluster.address")
    if config.cluster.address is not None and "://" in config.cluster.address:
        refuse(
            "cluster.address",
            "a controller outside the cluster cannot reach its workers; start the command on a node"
            " of the cluster and give host:port, or auto",
        )
    per_step = config.grpo.num_prompts_per_step
    ahead = _lookahead(config.sampler)
    if ahead is not None and ahead[1] < 0:
        refuse(f"sampler.{ahead[0]}", f"{ahead[1]} versions cannot be looked ahead; give 0 or more")
    if not isinstance(config.sampler, CustomSampler) and config.buffer_capacity is not None:
        needed = config.sampler.required_buffer_capacity(per_step)
        if config.buffer_capacity < needed:
            refuse(
                "buffer_capacity",
                f"the {config.sampler.__struct_config__.tag} sampler needs room for {needed} "
                f"groups of {per_step} a step to make progress; this is {config.buffer_capacity}",
            )
    if config.data.size < per_step:
        refuse(
            "data.size",
            f"{config.data.size} prompts do not fill one step of {per_step}"
            " (grpo.num_prompts_per_step)",
        )
    if config.grpo.data_parallel_size > per_step:
        refuse(
            "grpo.data_parallel_size",
            f"{config.grpo.data_parallel_size} policy workers share the groups of a step, and"
            f" there are {per_step} (grpo.num_prompts_per_step): some would have none",
        )
    if config.generation.max_new_tokens >= config.generation.max_model_len:
        refuse(
            "generation.max_new_tokens",
            f"{config.generation.max_new_tokens} new tokens leave no room for a prompt within"
            f" generation.max_model_len {config.generation.max_model_len}",
        )
    return (
        *found,
        *_impossible_timeouts(config),
        *_impossible_fleet(config),
        *_impossible_determinism(config),
    )


class DoubtfulSetting(Struct, frozen=True, kw_only=True):
    """A setting that a run works with, though hardly as it was meant."""

    path: str
    """Dotted path of the setting to look at."""
    reason: str


def doubtful(config: MasterConfig) -> tuple[DoubtfulSetting, ...]:
    """Every setting of a possible `config` that will not do what it seems to ask for."""
    found: list[DoubtfulSetting] = []
    backend = config.checkpoint_engine.backend
    for name, options in config.checkpoint_engine.engine_kwargs.items():
        if name != backend and options:
            reason = (
                f"not read: the engine is {backend} (checkpoint_engine.backend), and takes its"
                f" options from engine_kwargs.{backend}"
            )
            path = f"checkpoint_engine.engine_kwargs.{name}"
            found.append(DoubtfulSetting(path=path, reason=reason))
    prompts, per_step = config.data.size * config.data.max_epochs, config.grpo.num_prompts_per_step
    steps = -(-prompts // per_step)  # The last one may be a smaller one.
    if steps < config.grpo.max_steps:
        reason = (
            f"{config.grpo.max_steps} steps need {config.grpo.max_steps * per_step} prompts, and"
            f" there are {prompts} (data.size times data.max_epochs): the run ends after"
            f" {steps} steps"
        )
        found.append(DoubtfulSetting(path="grpo.max_steps", reason=reason))
    return tuple(found)


def _impossible_timeouts(config: MasterConfig) -> tuple[ImpossibleSetting, ...]:
    """Of every backend, also of those that are not read: it is written down wrongly."""
    each = config.checkpoint_engine.engine_kwargs.items()
    return tuple(
        ImpossibleSetting(
            path=f"checkpoint_engine.engine_kwargs.{name}.{REFIT_TIMEOUT}",
            reason=describe(timeout.failure()),
        )
        for name, options in each
        if not is_successful(timeout := refit_timeout(options))
    )


def _impossible_fleet(config: MasterConfig) -> tuple[ImpossibleSetting, ...]:
    found: list[ImpossibleSetting] = []
    fleet = config.generation.fleet
    if fleet.min_healthy > config.generation.engines:
        reason = (
            f"a run of {config.generation.engines} engines (generation.engines) never has"
            f" {fleet.min_healthy}"
        )
        found.append(ImpossibleSetting(path="generation.fleet.min_healthy", reason=reason))
    if fleet.dead_after < fleet.suspect_after:
        reason = (
            f"an engine is suspect after {fleet.suspect_after} missed probes"
            " (generation.fleet.suspect_after), and dead after as many or more"
        )
        found.append(ImpossibleSetting(path="generation.fleet.dead_after", reason=reason))
    return tuple(found)


def _impossible_determinism(config: MasterConfig) -> tuple[ImpossibleSetting, ...]:
    if not config.run.deterministic:
        return ()
    found: list[ImpossibleSetting] = []
    if not isinstance(config.sampler, InOrderSampler):
        reason = "only the in_order sampler trains the same batches in every run"
        found.append(ImpossibleSetting(path="run.deterministic", reason=reason))
    elif config.sampler.max_lookahead_versions > 0:
        reason = (
            "a deterministic run needs 0: with lookahead, timing decides which weights"
            " generate a batch"
        )
        found.append(ImpossibleSetting(path="sampler.max_lookahead_versions", reason=reason))
    if config.generation.backend != "torch":
        reason = "only the torch engine's answers do not depend on what else is in its batch"
        found.append(ImpossibleSetting(path="run.deterministic", reason=reason))
    return tuple(found)


def _lookahead(sampler: SamplerConfig) -> tuple[str, int] | None:
    """The setting that says how far a built-in policy looks ahead, and its value."""
    if isinstance(sampler, CustomSampler):
        return None
    if isinstance(sampler, InOrderSampler):
        return "max_lookahead_versions", sampler.max_lookahead_versions
    return "max_staleness_versions", sampler.max_staleness_versions
