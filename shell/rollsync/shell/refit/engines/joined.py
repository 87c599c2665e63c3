"""What a worker knows once its process group is set up: who it is, who sends to it, and to whom it
sends.

Rule kept here: who may be waiting for another is waited for a little longer, so that of several the
one that waits for the cause gives up first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollsync.pure.refit import RolloutWorker, RoutingTable
from rollsync.pure.refit.patience import wait_s
from rollsync.pure.refit.routes import Worker
from rollsync.shell.refit.engines.connections import Introduction, Receiver
from rollsync.shell.refit.engines.greeting import ReceivingEnd


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A worker's part in the routes of all.

    Attributes:
        me: who it is, and how many workers there are.
        receivers: whom it sends to; none for one that feeds nobody.
        receiving_end: who it is to its own sender; None for a policy worker.
        everybody_reads_directly: whether all workers are set to.
    """

    me: Introduction
    receivers: tuple[Receiver, ...]
    receiving_end: ReceivingEnd | None
    everybody_reads_directly: bool


def join(
    me: Worker,
    table: RoutingTable,
    workers: Sequence[Mapping[str, object]],
    *,
    is_on_host: Callable[[int], bool],
    endpoint: Callable[[Mapping[str, object], int], Mapping[str, object]],
    timeout_s: float,
) -> Joined:
    """This worker's part.

    Args:
        me: this worker.
        table: the routes of all.
        workers: every worker's metadata, policy workers first.
        is_on_host: whether the route to a rollout worker goes through the host's memory.
        endpoint: the address and secret of a rollout worker, from its metadata and its rank.
        timeout_s: how long one wait for a worker may take that waits for nobody else.
    """
    train_world_size = table.train_world_size
    rollout_world_size = table.rollout_world_size
    receiving_end = None
    if isinstance(me, RolloutWorker):
        receiving_end = ReceivingEnd(
            sender=table.sender_to(me.rank),
            rollout_rank=me.rank,
            train_world_size=train_world_size,
            rollout_world_size=rollout_world_size,
            timeout_s=wait_s(timeout_s, table.extra_waits_for_sender(me.rank)),
            on_host=is_on_host(me.rank),
        )

    def receiver(rank: int) -> Receiver:
        reached_at = endpoint(workers[train_world_size + rank], rank)
        return Receiver(
            rank=rank,
            address=str(reached_at["address"]),
            secret=bytes.fromhex(str(reached_at["secret"])),
            timeout_s=wait_s(timeout_s, table.extra_waits_for_receiver(rank)),
            on_host=is_on_host(rank),
        )

    return Joined(
        me=Introduction(
            worker=me, train_world_size=train_world_size, rollout_world_size=rollout_world_size
        ),
        receivers=tuple(receiver(rank) for rank in table.receivers_of(me)),
        receiving_end=receiving_end,
        everybody_reads_directly=all(worker["direct"] is True for worker in workers),
    )
