"""Gives a trainer's worker the RPC that a weight synchronizer asks of it.

Rule kept here: the worker says which weights it sends and at which version it is; the checkpoint
engine's life cycle, and nothing else of the worker, can be called by name through the RPC.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch

from rollsync.pure.refit import EngineChoice, TensorSpec
from rollsync.pure.refit.steps import Step
from rollsync.shell.refit.errors import RefitConfigurationError
from rollsync.shell.refit.host_memory import local_world_size, worker_total_memory_bytes
from rollsync.shell.refit.refit_sender import RefitSender
from rollsync.shell.refit.report import WorkerTransfer
from rollsync.shell.refit.weights import declared_specs


class PolicyRefitMixin:
    """The trainer side of a refit, for a class that holds a policy's weights.

    The class defines `iter_refit_weights` and `weight_version`; a Ray actor made of it, one per
    trainer rank, is what `policy.worker_group` runs. `rollsync.shell.refit.weights` has both
    halves of the job for an ordinary module: `checkpoint_weights` and `declare_weights`. Where
    there are several workers, and no `torch.distributed` that knows their ranks, it sets
    `refit_rank`.
    """

    _refit_sender: RefitSender | None = None
    _refit_rank: int | None = None

    @property
    def refit_rank(self) -> int:
        """This worker's rank among the policy's, from 0. Until it is set, `torch.distributed`'s
        where that is set up, and else 0. What is set counts from the worker's next engine on."""
        if self._refit_rank is not None:
            return self._refit_rank
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    @refit_rank.setter
    def refit_rank(self, rank: int) -> None:
        self._refit_rank = rank

    @property
    def workers_on_host(self) -> int:
        """How many workers share this host's memory, as far as this one knows: the synchronizer
        counts all that are in rollsync's groups."""
        return local_world_size()

    def weight_version(self) -> int:
        """The trainer version of the weights that `iter_refit_weights` yields now."""
        raise NotImplementedError

    def iter_refit_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yields every weight under its checkpoint name, full and on any device.

        It is called once per sync, and each tensor may be reused after the next is asked for. With
        the engine option `direct` there is an exception: receivers read the memory of tensors
        themselves then, so all of them have to keep theirs, unchanged, until the sync has ended.
        """
        raise NotImplementedError

    def prepare_refit_info(self) -> Mapping[str, TensorSpec] | None:
        """What `iter_refit_weights` will yield, in its order; None when that is not known."""
        return None

    def checkpoint_engine_rpc(
        self, checkpoint_method: str, method_kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Runs one step of the checkpoint engine's life cycle.

        Args:
            checkpoint_method: the step's name, as the synchronizer calls it.
            method_kwargs: its arguments.

        Raises:
            RefitConfigurationError: when there is no such step.
        """
        sender = self._refit_sender = self._refit_sender or RefitSender(rank=self.refit_rank)
        steps: dict[str, Callable[..., object]] = {
            Step.MEASURE: self._refit_total_memory_bytes,
            Step.MAKE: sender.init,
            Step.PREPARE: sender.prepare,
            Step.CONNECT: partial(self._refit_connect, sender),
            Step.TRANSFER: partial(self._refit_send, sender),
            Step.FINALIZE: sender.finalize,
        }
        if checkpoint_method not in steps:
            raise RefitConfigurationError(
                f"a policy worker has no step {checkpoint_method!r}",
                remedy=f"call one of {', '.join(steps)}",
            )
        return steps[checkpoint_method](**(method_kwargs or {}))

    def _refit_total_memory_bytes(self) -> int:
        return worker_total_memory_bytes(self.workers_on_host)

    def _refit_connect(
        self,
        sender: RefitSender,
        metadata: list[object],
        train_world_size: int,
        rollout_world_size: int,
    ) -> tuple[EngineChoice, ...]:
        sender.declare(declared_specs(self.prepare_refit_info()))
        return sender.init_process_group(
            metadata=metadata,
            train_world_size=train_world_size,
            rollout_world_size=rollout_world_size,
        )

    def _refit_send(
        self, sender: RefitSender, kv_scales: Mapping[str, float] | None = None
    ) -> WorkerTransfer:
        return sender.send(self._refit_weights(kv_scales), weight_version=self.weight_version)

    def _refit_weights(
        self, kv_scales: Mapping[str, float] | None
    ) -> Iterable[tuple[str, torch.Tensor]]:
        yield from self.iter_refit_weights()
        for name, scale in (kv_scales or {}).items():
            yield name, torch.tensor(scale, dtype=torch.float32)
