"""How a stream of weights can fail. A `TransferError` says which worker, in which stage, at which
tensor; a `StreamError` is of the stream itself."""

from __future__ import annotations

from collections.abc import Iterable

from rollsync.pure.refit.control import Failed
from rollsync.shell.refit.errors import RefitError
from rollsync.shell.refit.weights import WEIGHT_VERSION_NAME


class TransferError(RefitError):
    """A stream of weights did not reach its end.

    Args:
        worker: who noticed, `policy 0` or `rollout 3`.
        stage: what it was doing.
        tensor: the tensor it was at, or the first and the last of several; empty when at none.
    """

    def __init__(
        self, message: str, *, worker: str, stage: str, tensor: str = "", remedy: str = ""
    ) -> None:
        at = f", tensor {tensor}" if tensor else ""
        super().__init__(f"{worker}, while it {stage}{at}: {message}", remedy=remedy)
        self.worker = worker
        self.stage = stage
        self.tensor = tensor


class TransferTimeout(TransferError, TimeoutError):
    """The other end did not answer within `refit_timeout_s`."""

    waited_for: str = ""
    """The worker that did not answer, `policy 0` or `rollout 3`; empty where that is not known."""


class PeerLost(TransferError, ConnectionError):
    """The other end is gone: its process ended or it closed the connection."""


class PeerFailed(TransferError):
    """The other end gave up, and said why."""

    failed: Failed | None = None
    """What it said, which may be of a worker behind it; None where it was not said in a message."""

    @classmethod
    def heard(cls, failed: Failed, *, worker: str, stage: str) -> PeerFailed:
        """The error of a worker that is told of a failure."""
        at = f", at tensor {failed.tensor}" if failed.tensor else ""
        error = cls(
            f"{failed.worker} failed while it {failed.stage}{at}: {failed.message}",
            worker=worker,
            stage=stage,
            tensor=failed.tensor,
        )
        error.failed = failed
        return error


class PeerRefused(TransferError):
    """The other end does not know the run's secret, or sent what no end of a stream sends."""


class StreamError(RefitError):
    """A stream that breaks its own rules: a name twice, a type unknown, bytes missing."""


def name_tensors(names: Iterable[str]) -> str:
    """How an error names several tensors: the first and the last that the policy's iterator gave.
    The version, which rollsync adds to them, is none of those."""
    given = [name for name in names if name != WEIGHT_VERSION_NAME]
    return " to ".join(dict.fromkeys((given[0], given[-1]))) if given else ""


def told_of(error: BaseException, here: Failed) -> Failed:
    """What the other workers of a stream are told: who failed first, as far as that is known.

    Args:
        error: what ended the stream here.
        here: what there is to say if it was not heard from another worker.
    """
    return error.failed if isinstance(error, PeerFailed) and error.failed is not None else here


def let_down_by(peer: str, error: TransferError) -> TransferError:
    """The error of a rollout worker that another one let down, which is not its own failure.

    Args:
        peer: the other one.
        error: how it was noticed.
    """
    if isinstance(error, PeerFailed | PeerLost):
        return error
    failed = Failed(
        worker=peer,
        stage="took part in the stream",
        tensor=error.tensor,
        message=f"{type(error).__name__}: {error}",
    )
    return PeerFailed.heard(failed, worker=error.worker, stage=error.stage)
