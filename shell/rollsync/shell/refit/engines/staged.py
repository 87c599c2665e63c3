"""What the built-in engines have in common: streams through the transfer buffers of the sender.

An engine adds where it listens, what memory a sender packs into, and how a receiver reads it. The
buffers, `BUFFERS` of them, are a ring (one for each layout that the receivers keep): a policy
worker packs one part of a bucket while the one before is read, and that before it loaded. Part by
part the two ends talk over a connection of their own; see `rollsync.pure.refit.control` for what
they say, and for what a buffer, a bucket and a part are.

A rollout worker that relays has its receivers read from the buffers that it reads into itself.

Rules kept here: a connection carries one stream, so that nothing of a failed stream can reach the
next; memory is filled again only when every reader of it has released it; and what `prepare` and
the process groups reserve, `finalize` gives back, however far they came.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from rollsync.pure.refit import (
    PolicyWorker,
    RolloutWorker,
    RoutingTable,
    TensorSpec,
    check_bucket_bytes,
    describe,
)
from rollsync.pure.refit.control import StreamBegins, StreamEnded
from rollsync.pure.refit.layout import Part
from rollsync.pure.refit.patience import REFIT_TIMEOUT, parse_timeout
from rollsync.pure.refit.routes import Worker
from rollsync.shell.refit.engines.addresses import Listener
from rollsync.shell.refit.engines.base import Batch, CountingEngine, DeclaringEngine, Weights
from rollsync.shell.refit.engines.batches import ReceivedBatches
from rollsync.shell.refit.engines.declared import Declaration, Layout
from rollsync.shell.refit.engines.direct import (
    Destinations,
    DirectEngine,
    DirectMemory,
    check_relayed,
)
from rollsync.shell.refit.engines.direct_receiving import DirectReader
from rollsync.shell.refit.engines.direct_sending import DirectSender
from rollsync.shell.refit.engines.joined import Joined, join
from rollsync.shell.refit.engines.kept_errors import let_go
from rollsync.shell.refit.engines.lifelines import HeldLifeline, Lifeline
from rollsync.shell.refit.engines.media import ReceiverMedium, SenderMemory
from rollsync.shell.refit.engines.metadata import (
    checked_metadata,
    host_identity,
    index_of,
    routes_between,
)
from rollsync.shell.refit.engines.opening import Expectation
from rollsync.shell.refit.engines.receiving import receive_stream
from rollsync.shell.refit.engines.relaying import Relay
from rollsync.shell.refit.engines.sending import SendingStream
from rollsync.shell.refit.errors import RefitConfigurationError, accepted

BUFFERS: Final = 2


class StagedEngine(DeclaringEngine, DirectEngine, CountingEngine):
    """The part of a built-in engine that does not depend on the memory in between.

    Args:
        bucket_size: bytes of one buffer, a multiple of 256.
        refit_timeout_s: how long one wait for the other end may take.
        checksum: check every bucket with XXH3.
        direct: how receivers read tensors themselves; None when they do not.
        relay: let rollout workers hand weights on wherever a link between hosts would carry them
            more often than once for each policy worker; not with `direct`.
        in_parts: whether a receiver asks for what it keeps of each tensor, and not for all of it.
    """

    backend: ClassVar[str]

    def __init__(
        self,
        bucket_size: int,
        *,
        refit_timeout_s: float,
        checksum: bool,
        direct: DirectMemory | None = None,
        relay: bool = False,
        in_parts: bool = True,
    ) -> None:
        mistake = check_bucket_bytes(bucket_size)
        if mistake is not None:
            raise RefitConfigurationError(describe(mistake), error=mistake)
        check_relayed(direct=direct is not None, relay=relay)
        self._bucket_bytes = bucket_size
        self._timeout_s = accepted(parse_timeout(REFIT_TIMEOUT, refit_timeout_s))
        self._checksum = checksum
        self._listener: Listener | None = None
        self._own_lifeline: Lifeline | None = None
        self._senders_lifeline: HeldLifeline | None = None
        self._memory: SenderMemory | None = None
        self._medium: ReceiverMedium | None = None
        self._relay = relay
        self._in_parts = in_parts
        self._joined: Joined | None = None
        self._expectation = Expectation()
        self._comes_in_parts = False
        self._buckets: int | None = None
        self._direct = direct
        self._destinations: Destinations | None = None

    @abstractmethod
    def _listen(self) -> Listener:
        """Listen for a sender."""

    @abstractmethod
    def _check_peer(self, index: int, metadata: Mapping[str, object]) -> None:
        """Raise `RefitConfigurationError` if this engine cannot reach that worker."""

    @abstractmethod
    def _is_on_host(self, rollout_rank: int) -> bool:
        """Whether the route to a rollout worker, this one or one that it feeds, goes through the
        host's memory; if not, it goes over the network."""

    @abstractmethod
    def _reserve(self) -> SenderMemory:
        """Reserve the buffers of a sender."""

    @abstractmethod
    def _reader(self) -> ReceiverMedium:
        """Reserve what a receiver needs to read a sender's buffers."""

    def get_target_weight_layout(self) -> tuple[Part, ...] | None:
        """What this rollout worker keeps, as it was told."""
        layout = self._expectation.layout
        return None if layout is None else layout.parts

    def declare_weights(self, declared: Sequence[TensorSpec] | None) -> None:
        """Take what streams will hold; the other side's declaration has to be the same.

        Raises:
            RefitConfigurationError: no stream can hold these tensors.
        """
        known = self._expectation.declaration
        if declared is None:
            known = None
        elif known is None or known.specs != tuple(declared):
            known = Declaration(declared, self._bucket_bytes)
        self._expectation = replace(self._expectation, declaration=known)

    def set_target_weight_layout(self, layout: Sequence[Part] | None) -> None:
        """Keep these parts of the declared tensors."""
        known = self._expectation.layout
        if layout is None or not self._in_parts:
            known = None
        elif known is None or known.parts != tuple(layout):
            known = Layout(layout)
        self._expectation = replace(self._expectation, layout=known)

    @property
    def comes_in_parts(self) -> bool:
        """Whether the stream that is being received carries parts."""
        return self._comes_in_parts

    def _note_begin(self, begins: StreamBegins) -> None:
        self._comes_in_parts = begins.layout is not None

    @property
    def buckets(self) -> int | None:
        """How many buckets the last stream was cut into."""
        return self._buckets

    def _note_end(self, ended: StreamEnded) -> None:
        self._buckets = ended.buckets

    @property
    def reads_directly(self) -> bool:
        """Whether a receiver reads tensors itself, once it knows where to."""
        return self._direct is not None

    def read_into(self, destinations: Destinations | None) -> None:
        """Take the destinations of the next stream; None: everything is handed out in batches."""
        self._destinations = destinations

    def prepare(self) -> dict[str, object]:
        """Listen for the sender. Buffers are reserved when it is known what this worker does."""
        if self._listener is None:
            self._listener = self._listen()
        if self._own_lifeline is None:
            self._own_lifeline = Lifeline(self._listen())
        return {
            "backend": self.backend,
            "host": host_identity(),
            "address": self._listener.address,
            "secret": self._listener.secret.hex(),
            "lifeline": self._own_lifeline.address,
            "direct": self._direct is not None,
            "relay": self._relay,
        }

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[object],
    ) -> None:
        """Find this worker's rollout workers, and reserve the buffers if there are any."""
        workers = self._checked(metadata, train_world_size, rollout_world_size)
        joined = self._join(PolicyWorker(worker_rank), workers, train_world_size)
        if joined.receivers and self._memory is None:
            self._memory = self._reserve()

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[object],
    ) -> None:
        """Learn who this worker is and who sends to it, to check the sender's greeting against;
        find the workers that it relays to, if there are any; get ready to read."""
        workers = self._checked(metadata, train_world_size, rollout_world_size)
        joined = self._join(RolloutWorker(rollout_rank), workers, train_world_size)
        if self._medium is None:
            self._medium = self._reader()
        if self._senders_lifeline is not None:
            self._senders_lifeline.close()
        if joined.receiving_end is not None:
            sender = workers[index_of(joined.receiving_end.sender, train_world_size)]
            self._senders_lifeline = HeldLifeline(str(sender["lifeline"]))

    def _join(
        self, me: Worker, workers: Sequence[Mapping[str, object]], train_world_size: int
    ) -> Joined:
        """Take this worker's part in the routes of all."""
        table = routes_between(workers, train_world_size, relay=self._relay)
        self._take_routes(me, table, workers)
        joined = self._joined = join(
            me,
            table,
            workers,
            is_on_host=self._is_on_host,
            endpoint=self._endpoint,
            timeout_s=self._timeout_s,
        )
        return joined

    async def send_weights(self, weights: Weights) -> None:
        """Send one stream to every rollout worker that this worker feeds.

        Raises:
            TransferError: a receiver failed, is gone, or did not answer in time.
            StreamError: the stream itself cannot be sent.
        """
        joined = self._joined
        if joined is None or not joined.receivers:
            for _ in weights:
                # Making the weights may be a collective that every rank has to join.
                pass
            return
        if self._memory is None:
            raise _not_ready("prepare and init_policy_process_group")
        failed = True
        try:
            await self._stream(joined, self._memory).send(joined.receivers, weights)
            failed = False
        except BaseException as error:
            let_go(error)
            raise
        finally:
            if self._direct is not None:
                self._direct.withdraw(failed=failed)

    def _stream(self, joined: Joined, memory: SenderMemory) -> SendingStream:
        return SendingStream(
            memory,
            me=joined.me,
            checksum=self._checksum,
            declaration=self._expectation.declaration,
            direct=self._direct_sender(joined),
        )

    def receive_weight_batches(self) -> AsyncGenerator[Batch, None]:
        """Receive one stream: each batch is valid until the next is asked for.

        Raises:
            TransferError: the sender failed, is gone, or did not answer in time.
            StreamError: the stream breaks the packing rules.
        """
        joined, lifeline, medium = self._joined, self._senders_lifeline, self._medium
        receiving_end = None if joined is None else joined.receiving_end
        if joined is None or receiving_end is None or lifeline is None or medium is None:
            raise _not_ready("prepare and init_rollout_process_group")
        listener = self._entrance(on_host=receiving_end.on_host)
        if listener is None:
            raise _not_ready("prepare and init_rollout_process_group")
        return ReceivedBatches(
            lambda stop: receive_stream(
                listener,
                lifeline,
                medium,
                me=receiving_end,
                expectation=self._expectation,
                on_begin=self._note_begin,
                on_end=self._note_end,
                stop=stop,
                direct=self._direct_reader(joined),
                relay=_relaying(joined, medium),
            )
        )

    def _direct_sender(self, joined: Joined) -> DirectSender | None:
        if self._direct is None or not joined.everybody_reads_directly:
            return None
        return DirectSender(
            self._direct,
            window_bytes=BUFFERS * self._bucket_bytes,
            checksum=self._checksum,
        )

    def _direct_reader(self, joined: Joined) -> DirectReader | None:
        if self._direct is None or not joined.everybody_reads_directly:
            return None
        return DirectReader(self._direct, self._destinations, self._checksum)

    def finalize(self) -> None:
        """Stop listening and give back all buffers."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._own_lifeline is not None:
            self._own_lifeline.close()
            self._own_lifeline = None
        if self._senders_lifeline is not None:
            self._senders_lifeline.close()
            self._senders_lifeline = None
        if self._direct is not None:
            self._direct.release()
        self._release_memory()
        self._joined = None
        self._destinations = None

    def _release_memory(self) -> None:
        """Give back all buffers."""
        if self._medium is not None:
            self._medium.release()
            self._medium = None
        if self._memory is not None:
            self._memory.release()
            self._memory = None

    def _take_routes(
        self, me: Worker, table: RoutingTable, workers: Sequence[Mapping[str, object]]
    ) -> None:
        """Learn the routes to and from this worker, before anything is reserved for them.

        Args:
            me: this worker.
            table: the routes of all.
            workers: every worker's metadata, policy workers first.
        """

    def _entrance(self, *, on_host: bool) -> Listener | None:
        """Where this worker's sender comes in, over the host's memory or over the network."""
        return self._listener

    def _endpoint(self, metadata: Mapping[str, object], rank: int) -> Mapping[str, object]:
        """The address and secret by which this worker reaches a rollout worker."""
        return metadata

    def _checked(
        self, metadata: Sequence[object], train_world_size: int, rollout_world_size: int
    ) -> list[Mapping[str, object]]:
        """The workers' metadata, if all of them answered as this engine does."""
        workers = checked_metadata(
            metadata,
            backend=self.backend,
            relay=self._relay,
            train_world_size=train_world_size,
            rollout_world_size=rollout_world_size,
        )
        for index, worker in enumerate(workers):
            self._check_peer(index, worker)
        return workers


def _relaying(joined: Joined, medium: ReceiverMedium) -> Relay | None:
    if not joined.receivers or medium.own is None:
        return None
    return Relay(medium.own, joined.me, joined.receivers)


def _not_ready(missing: str) -> RefitConfigurationError:
    return RefitConfigurationError("the engine is not connected", remedy=f"call {missing} first")
