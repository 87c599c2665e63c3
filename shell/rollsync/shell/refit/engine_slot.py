"""The checkpoint engine of one worker, from the first `init_checkpoint_engine` on.

Rule kept here: asked again with the same options, the engine that is there stays, because its
start may be slow; with others, it is finalized and made anew.
"""

from collections.abc import Mapping, Sequence

from rollsync.pure.refit import EngineChoice, TensorSpec
from rollsync.pure.refit.layout import Part
from rollsync.shell.refit.engines import (
    CheckpointEngine,
    DeclaringEngine,
    create_checkpoint_engine,
)
from rollsync.shell.refit.engines.base import CountingEngine, RoutingEngine
from rollsync.shell.refit.engines.direct import Destinations, DirectEngine
from rollsync.shell.refit.errors import RefitConfigurationError


class EngineSlot:
    """Holds a worker's checkpoint engine, or none yet."""

    def __init__(self) -> None:
        self._engine: CheckpointEngine | None = None
        self._options: tuple[str, int, Mapping[str, object]] | None = None

    @property
    def engine(self) -> CheckpointEngine:
        """The engine.

        Raises:
            RefitConfigurationError: when there is none yet.
        """
        if self._engine is None:
            raise RefitConfigurationError(
                "there is no checkpoint engine yet", remedy="call init_checkpoint_engine first"
            )
        return self._engine

    def init(self, backend: str, bucket_size_bytes: int, engine_kwargs: dict[str, object]) -> None:
        """Makes the engine, unless it is there with these options."""
        options = (backend, bucket_size_bytes, engine_kwargs)
        if self._engine is not None:
            if self._options == options:
                return
            self._engine.finalize()
        self._engine = create_checkpoint_engine(
            backend, bucket_size_bytes=bucket_size_bytes, engine_kwargs=engine_kwargs
        )
        self._options = options

    def prepare(self, **of_worker: object) -> object:
        """Makes the engine reachable; answers its metadata, to which a mapping gets these added.

        Raises:
            RefitConfigurationError: the engine relies on what only NeMo-RL's workers do for it.
        """
        if self.engine.shard_expert_weights:
            raise RefitConfigurationError(
                f"{type(self.engine).__name__} sets shard_expert_weights, by which NeMo-RL's"
                " workers choose the experts that they send, and rollsync's do not",
                remedy="have the engine leave it False, which sends every tensor whole; or use"
                " `nixl`, `shm` or `auto`, which send a rank what it keeps",
            )
        metadata: object = self.engine.prepare()
        return {**metadata, **of_worker} if isinstance(metadata, dict) else metadata

    def declare(self, specs: Sequence[TensorSpec] | None) -> None:
        """Tells an engine that compares declarations what streams will hold; no other needs it."""
        if isinstance(self._engine, DeclaringEngine):
            self._engine.declare_weights(specs)

    def keep(self, layout: Sequence[Part] | None) -> None:
        """Tells such an engine what this rollout worker keeps of the declared tensors."""
        if isinstance(self._engine, DeclaringEngine):
            self._engine.set_target_weight_layout(layout)

    @property
    def reads_directly(self) -> bool:
        """Whether the engine may read tensors straight into parameters."""
        return isinstance(self._engine, DirectEngine) and self._engine.reads_directly

    def read_into(self, destinations: Destinations | None) -> None:
        """Tells such an engine where to."""
        if isinstance(self._engine, DirectEngine):
            self._engine.read_into(destinations)

    @property
    def choices(self) -> tuple[EngineChoice, ...]:
        """What carries each of this worker's routes; none if the engine does not choose."""
        return self._engine.choices if isinstance(self._engine, RoutingEngine) else ()

    @property
    def comes_in_parts(self) -> bool:
        """Whether the stream that is being received carries the parts that this worker keeps."""
        return isinstance(self._engine, DeclaringEngine) and self._engine.comes_in_parts

    @property
    def buckets(self) -> int | None:
        """How many buckets the last stream was cut into, where the engine counts them."""
        return self._engine.buckets if isinstance(self._engine, CountingEngine) else None

    def finalize(self) -> bool:
        """Gives back what `prepare` reserved; answers whether there was an engine."""
        if self._engine is None:
            return False
        self._engine.finalize()
        return True
