"""What the ends of a stream agree on between their greeting and the first bucket.

Rules kept here: two declarations that differ are an error that names the first tensor that differs,
before a byte of payload; a rank that keeps parts of tensors is sent these parts only where both
ends have the same declaration, and all of every tensor where not.
"""

from __future__ import annotations

from dataclasses import dataclass

from returns.pipeline import is_successful

from rollsync.codecs import describe as describe_codec
from rollsync.codecs.refit.plan import DECLARED_PLAN
from rollsync.pure.refit import describe, first_difference
from rollsync.pure.refit.control import (
    LayoutReported,
    LayoutRequested,
    PlanAnswered,
    PlanDeclared,
    PlanOffered,
    StreamBegins,
)
from rollsync.pure.refit.errors import TensorsDiffer
from rollsync.pure.refit.relays import answer_for_all, differs
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.declared import Declaration, Layout
from rollsync.shell.refit.engines.relaying import Relay
from rollsync.shell.refit.errors import WeightMismatch

STAGE = "compared the declarations"


@dataclass(frozen=True)
class Expectation:
    """What one end, a sender or a receiver, knows of its streams beforehand.

    Attributes:
        declaration: what they hold; None: whatever comes.
        layout: the parts that this rank keeps; None: all of every tensor, and at a sender.
    """

    declaration: Declaration | None = None
    layout: Layout | None = None


async def offer_plan(
    channel: ControlChannel, declaration: Declaration | None, rollout_rank: int
) -> str | None:
    """The sender's half, towards one receiver: the digest of the layout that it is to be sent.

    Raises:
        PeerFailed: the receiver has another declaration; the error says where they differ.
        RefitConfigurationError: the receiver keeps what is not declared.
    """
    channel.enter(STAGE)
    await channel.send(PlanOffered(digest=None if declaration is None else declaration.digest))
    answer, _ = await channel.receive()
    if not isinstance(answer, PlanAnswered):
        raise channel.unexpected(answer)
    if declaration is None:
        return None
    if answer.digest is not None and answer.digest != declaration.digest:
        await channel.send(PlanDeclared(plan=DECLARED_PLAN.encode(declaration.plan)))
        # The receiver finds the difference, and gives up with it.
        raise channel.unexpected((await channel.receive())[0])
    if answer.layout is None or declaration.knows(answer.layout):
        return answer.layout
    await channel.send(LayoutRequested())
    reported, _ = await channel.receive()
    if not isinstance(reported, LayoutReported):
        raise channel.unexpected(reported)
    layout = Layout(reported.parts)
    if layout.digest != answer.layout:
        raise channel.refused("a layout of another digest than it announced")
    declaration.learn(layout, rollout_rank)
    return answer.layout


async def answer_plan(
    channel: ControlChannel, expectation: Expectation, relay: Relay | None
) -> StreamBegins:
    """The receiver's half, for those too that it relays to: how the stream comes.

    Raises:
        WeightMismatch: the sender has another declaration.
        PeerFailed: one of those it relays to has another one than the sender.
    """
    channel.enter(STAGE)
    offered, _ = await channel.receive()
    if not isinstance(offered, PlanOffered):
        raise channel.unexpected(offered)
    declaration, layout = expectation.declaration, expectation.layout
    agreed = declaration is not None and declaration.digest == offered.digest
    own = PlanAnswered(
        digest=None if declaration is None else declaration.digest,
        layout=None if layout is None or not agreed else layout.digest,
    )
    others = () if relay is None else await relay.offer(channel, offered)
    answer = answer_for_all(offered.digest, own, others)
    await channel.send(answer)
    if declaration is not None and differs(offered.digest, own):
        await _explain_difference(channel, declaration)
    if relay is not None and differs(offered.digest, answer):
        await relay.explain_difference(channel, offered)
    body, _ = await channel.receive()
    if isinstance(body, LayoutRequested) and layout is not None and answer.layout is not None:
        await channel.send(LayoutReported(parts=layout.parts))
        body, _ = await channel.receive()
    if not isinstance(body, StreamBegins) or body.layout not in (answer.layout, None):
        raise channel.unexpected(body)
    return body


async def _explain_difference(channel: ControlChannel, declaration: Declaration) -> None:
    """Raise what the sender's declaration differs in."""
    body, _ = await channel.receive()
    if not isinstance(body, PlanDeclared):
        raise channel.unexpected(body)
    theirs = DECLARED_PLAN.decode(body.plan)
    if not is_successful(theirs):
        raise channel.refused(describe_codec(theirs.failure()))
    difference = first_difference(declaration.plan, theirs.unwrap())
    if difference is None:
        raise channel.unexpected(body)
    tensor = difference.tensor if isinstance(difference, TensorsDiffer) else ""
    raise WeightMismatch(
        f"{channel.peer} and {channel.worker} declare different weights: {describe(difference)}",
        tensor=tensor,
    )
