"""What a rollout worker that relays says to its sender: for itself and for its receivers.

A relay passes on every part of a bucket as it came, and its receivers read it from the relay's own
ring of buffers, at the same position. To its sender it is one receiver, which wants what all of
them want and has what all of them have.

Rule kept here: nothing is released, and no layout taken, that one of them still needs otherwise; so
what the sender is told holds for everybody behind the relay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollsync.pure.refit.control import PlanAnswered


def answer_for_all(
    offered: str | None, own: PlanAnswered, receivers: Sequence[PlanAnswered]
) -> PlanAnswered:
    """The answer of a relay to a plan that is offered.

    Args:
        offered: The digest of the sender's declaration.
        own: What the relay would answer for itself.
        receivers: What its receivers have answered to the same offer.

    Returns:
        A declaration that differs from the offered one, if anybody has one. The layout that all of
        them keep; none, which is all of every tensor, if they keep different ones.
    """
    answers = (own, *receivers)
    differing = next((each.digest for each in answers if differs(offered, each)), own.digest)
    alike = all(each.layout == own.layout for each in receivers)
    return PlanAnswered(digest=differing, layout=own.layout if alike else None)


def differs(offered: str | None, answer: PlanAnswered) -> bool:
    """Whether both sides have a declaration, and not the same one."""
    return offered is not None and answer.digest is not None and answer.digest != offered


def released_by_all(own: int, receivers: Iterable[int]) -> int:
    """Before which position of the stream a relay releases its sender's buffers.

    Args:
        own: What it has loaded itself, or copied away.
        receivers: What each of its receivers has released of the relay's buffers.
    """
    return min((own, *receivers))
