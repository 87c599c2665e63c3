"""Who sends the weights to whom: one table for all workers of both sides.

With at least as many policy workers as rollout workers, policy i feeds rollout i and the rest feed
nobody. (They still drain their weights: making them may take collectives that all must join.)
With fewer, each policy worker has an equal share of the rollout workers, in rank order. Where
hosts are known, a policy worker sends the weights once over the link to the first host, to the
first of its workers there, and that one hands them on: to the others on its host, and to the first
one on the next host. So no link between hosts carries them more often than once per policy worker.

Rule kept here: every rollout worker has exactly one sender, and following senders from it leads to
a policy worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct
from returns.result import Failure, Result, Success

from rollsync.pure.refit.errors import EmptyWorld, RouteError, SitesIncomplete


class PolicyWorker(Struct, frozen=True, tag=True):
    """A policy worker, by its rank."""

    rank: int

    def __str__(self) -> str:
        return f"policy {self.rank}"


class RolloutWorker(Struct, frozen=True, tag=True):
    """A rollout worker, by its rank among all rollout workers."""

    rank: int

    def __str__(self) -> str:
        return f"rollout {self.rank}"


Worker = PolicyWorker | RolloutWorker


class Sites(Struct, frozen=True, kw_only=True):
    """Where the workers are, and what they keep.

    Attributes:
        policy_hosts: Host name of every policy worker, by rank.
        rollout_hosts: Host name of every rollout worker, by rank.
        rollout_shards: A number for what each rollout worker keeps, by rank: workers with the same
            one keep the same parts of the weights, and can hand them on to each other. Empty when
            every worker is sent everything.
    """

    policy_hosts: tuple[str, ...]
    rollout_hosts: tuple[str, ...]
    rollout_shards: tuple[int, ...] = ()


class Route(Struct, frozen=True):
    """One edge of the table: the weights that `receiver` gets, it gets from `sender`."""

    sender: Worker
    receiver: RolloutWorker


class EngineChoice(Struct, frozen=True, kw_only=True):
    """The built-in engine that carries a route, and why it does."""

    route: Route
    engine: Literal["shm", "nixl"]
    reason: str

    def __str__(self) -> str:
        return f"{self.route.sender} to {self.route.receiver} by {self.engine}: {self.reason}"


def choices_among(answers: Iterable[object]) -> tuple[EngineChoice, ...]:
    """What carries each route, in the order of the rollout ranks.

    Args:
        answers: what the policy workers said when they had connected; one whose engine does not
            choose says something else.
    """
    each = (choice for answer in answers if isinstance(answer, tuple) for choice in answer)
    choices = (choice for choice in each if isinstance(choice, EngineChoice))
    return tuple(sorted(choices, key=lambda choice: choice.route.receiver.rank))


NOTHING_TO_RELAY = (
    "no relays: no link between hosts would carry weights more than once, as where all workers are"
    " on one host"
)
"""What is to be said where relays were asked for and `relayed` finds none."""


def relayed(routes: Iterable[Route]) -> bool:
    """Whether a rollout worker sends."""
    return any(isinstance(route.sender, RolloutWorker) for route in routes)


class RoutingTable(Struct, frozen=True, kw_only=True):
    """All routes, the one to rollout rank r at index r."""

    train_world_size: int
    routes: tuple[Route, ...]

    @property
    def rollout_world_size(self) -> int:
        """Number of rollout workers, each of which has one route to it."""
        return len(self.routes)

    def sender_to(self, rollout_rank: int) -> Worker:
        """Who sends to a rollout worker."""
        return self.routes[rollout_rank].sender

    def receivers_of(self, sender: Worker) -> tuple[int, ...]:
        """The rollout ranks that a worker sends to, in order; none for an idle one."""
        return tuple(route.receiver.rank for route in self.routes if route.sender == sender)

    def path_to(self, rollout_rank: int) -> tuple[Worker, ...]:
        """The senders between a policy worker, which comes first, and a rollout worker."""
        path: list[Worker] = []
        sender = self.sender_to(rollout_rank)
        while isinstance(sender, RolloutWorker):
            path.append(sender)
            sender = self.sender_to(sender.rank)
        return (sender, *reversed(path))

    @property
    def heads(self) -> tuple[int, ...]:
        """For every rollout rank, the one of its chain that a policy worker sends to: itself, or
        the first of the relays before it."""
        heads: list[int] = []
        # A relay has a lower rank than whom it relays to.
        for rank, route in enumerate(self.routes):
            sender = route.sender
            heads.append(rank if isinstance(sender, PolicyWorker) else heads[sender.rank])
        return tuple(heads)

    @property
    def origins(self) -> tuple[int, ...]:
        """For every rollout rank, the policy worker whose weights it gets."""
        return tuple(self.routes[head].sender.rank for head in self.heads)

    def routes_of(self, policy_rank: int) -> tuple[Route, ...]:
        """The routes that the weights of a policy worker take, relays' included."""
        return tuple(
            route
            for route, origin in zip(self.routes, self.origins, strict=True)
            if origin == policy_rank
        )

    def extra_waits_for_receiver(self, rollout_rank: int) -> int:
        """How much longer than another a rollout worker is waited for by its sender, in units of
        `patience.EXTRA_WAIT_S`: as many as there are workers in a row behind it, each of which
        waits for the next. So of all who wait, the one next to a worker that is stuck gives up
        first, and can say who it is."""
        after = [0] * self.rollout_world_size
        # A relay has a lower rank than whom it relays to.
        for route in reversed(self.routes[rollout_rank:]):
            if isinstance(route.sender, RolloutWorker):
                relay = route.sender.rank
                after[relay] = max(after[relay], 1 + after[route.receiver.rank])
        return after[rollout_rank]

    def extra_waits_for_sender(self, rollout_rank: int) -> int:
        """How much longer a rollout worker waits for its sender, in the same units: longer than any
        sender for its receiver, and longer than the relays before it."""
        before: list[int] = []
        for route in self.routes:
            relay = route.sender
            before.append(0 if isinstance(relay, PolicyWorker) else 1 + before[relay.rank])
        longest = max(before)
        return longest + 1 + before[rollout_rank] if longest else 0

    @property
    def has_relays(self) -> bool:
        """Whether a rollout worker sends."""
        return relayed(self.routes)

    @property
    def idle_policy_ranks(self) -> tuple[int, ...]:
        """Policy workers that feed nobody, and only drain their weights."""
        feeding = {r.sender.rank for r in self.routes if isinstance(r.sender, PolicyWorker)}
        return tuple(rank for rank in range(self.train_world_size) if rank not in feeding)


def plan_routes(
    train_world_size: int, rollout_world_size: int, sites: Sites | None = None
) -> Result[RoutingTable, RouteError]:
    """The whole table, the same on every worker that asks.

    Args:
        train_world_size: Number of policy workers, at least 1.
        rollout_world_size: Number of rollout workers, at least 1.
        sites: Where the workers are. Without it every policy worker sends to each of its rollout
            workers itself.
    """
    if train_world_size < 1:
        return Failure(EmptyWorld(side="policy", world_size=train_world_size))
    if rollout_world_size < 1:
        return Failure(EmptyWorld(side="rollout", world_size=rollout_world_size))
    senders: list[Worker] = [
        PolicyWorker(_feeder_of(rank, train_world_size, rollout_world_size))
        for rank in range(rollout_world_size)
    ]
    if sites is not None:
        incomplete = _check_sites(train_world_size, rollout_world_size, sites)
        if incomplete is not None:
            return Failure(incomplete)
        _relay(senders, sites)
    return Success(
        RoutingTable(
            train_world_size=train_world_size,
            routes=tuple(Route(sender, RolloutWorker(rank)) for rank, sender in enumerate(senders)),
        )
    )


def choose_engine(route: Route, sender_host: str, receiver_host: str) -> EngineChoice:
    """The built-in engine for a route: shared memory inside a host, NIXL between hosts.

    Args:
        route: Who sends to whom.
        sender_host: The sender's host. Two workers have the same one exactly if they can share
            memory: one kernel, and one name space for its sockets.
        receiver_host: The receiver's.
    """
    if sender_host == receiver_host:
        return EngineChoice(route=route, engine="shm", reason=f"both are on host {sender_host}")
    return EngineChoice(
        route=route,
        engine="nixl",
        reason=f"the sender is on host {sender_host}, the receiver on {receiver_host}",
    )


def _feeder_of(rollout_rank: int, train_world_size: int, rollout_world_size: int) -> int:
    """The policy rank whose share a rollout worker is in. Shares differ by one worker at most."""
    if train_world_size >= rollout_world_size:
        return rollout_rank
    return rollout_rank * train_world_size // rollout_world_size


def _check_sites(
    train_world_size: int, rollout_world_size: int, sites: Sites
) -> SitesIncomplete | None:
    if len(sites.policy_hosts) != train_world_size:
        return SitesIncomplete(
            side="policy", world_size=train_world_size, given=len(sites.policy_hosts)
        )
    for given in (sites.rollout_hosts, sites.rollout_shards):
        if len(given) != rollout_world_size and (given or given is sites.rollout_hosts):
            return SitesIncomplete(side="rollout", world_size=rollout_world_size, given=len(given))
    return None


def _relay(senders: list[Worker], sites: Sites) -> None:
    """Puts a relay in the place of a policy worker wherever the link was crossed before."""
    shards: Sequence[int] = sites.rollout_shards or [0] * len(senders)
    # By policy worker and shard: the first receiver on each host, in the order of the chain.
    chains: dict[tuple[int, int], dict[str, int]] = {}
    for rank, sender in enumerate(senders):
        host = sites.rollout_hosts[rank]
        if host == sites.policy_hosts[sender.rank]:
            continue
        chain = chains.setdefault((sender.rank, shards[rank]), {})
        if host in chain:
            senders[rank] = RolloutWorker(chain[host])
        else:
            if chain:
                senders[rank] = RolloutWorker(next(reversed(chain.values())))
            chain[host] = rank
