"""How a stream of weights can fail. Each error says which rank, in which stage, at which tensor."""

from __future__ import annotations

from rollsync.shell.refit.errors import RefitError


class TransferError(RefitError):
    """A stream of weights did not reach its end.

    Args:
        rank: the worker that noticed, `policy 0` or `rollout 3`.
        stage: what it was doing.
        tensor: the tensor it was at; empty when at none.
    """

    def __init__(
        self, message: str, *, rank: str, stage: str, tensor: str = "", remedy: str = ""
    ) -> None:
        at = f", tensor {tensor}" if tensor else ""
        super().__init__(f"{rank}, while it {stage}{at}: {message}", remedy=remedy)
        self.rank = rank
        self.stage = stage
        self.tensor = tensor


class TransferTimeout(TransferError, TimeoutError):
    """The other end did not answer within `refit_timeout_s`."""


class PeerLost(TransferError, ConnectionError):
    """The other end is gone: its process ended or it closed the connection."""


class PeerFailed(TransferError):
    """The other end gave up, and said why."""


class PeerRefused(TransferError):
    """The other end does not know the run's secret, or sent what no end of a stream sends."""
