"""What ranks answer to a step: values in plain form, and one error for all that failed."""

import msgspec
import pytest

from rollsync.pure.refit.blame import HowEnded, StepEnd
from rollsync.shell.refit.engines.errors import PeerFailed, PeerLost, TransferTimeout
from rollsync.shell.refit.errors import EngineStepFailed
from rollsync.shell.refit.rank_answers import RankAnswer, RankDone, rank_failed, values_of

LOST = PeerLost("gone", worker="rollout 0", stage="received")
HEARD = PeerFailed("another one failed", worker="rollout 1", stage="received")
BY_ITSELF = OSError("no memory")


def late(waited_for: str) -> TransferTimeout:
    error = TransferTimeout("nothing came", worker="rollout 0", stage="received")
    error.waited_for = waited_for
    return error


def plain(*answers: RankAnswer) -> list[object]:
    return [msgspec.to_builtins(answer) for answer in answers]


def test_what_all_ranks_did_well_is_their_values() -> None:
    assert values_of("step", plain(RankDone(3), RankDone(None))) == [3, None]


@pytest.mark.parametrize(
    ("errors", "end", "first"),
    [
        ((HEARD, LOST), StepEnd(HowEnded.HEARD), 0),
        ((HEARD, BY_ITSELF), StepEnd(HowEnded.FAILED), 1),
        ((HEARD, late("policy 0")), StepEnd(HowEnded.TIMED_OUT, ("policy 0",)), 1),
        ((late(""), HEARD), StepEnd(HowEnded.TIMED_OUT), 0),
        (
            (late("policy 0"), late("policy 1")),
            StepEnd(HowEnded.TIMED_OUT, ("policy 0", "policy 1")),
            0,
        ),
    ],
)
def test_the_rank_that_says_most_speaks_for_its_engine(
    errors: tuple[Exception, ...], end: StepEnd, first: int
) -> None:
    answers = [rank_failed(rank, error) for rank, error in enumerate(errors)]
    with pytest.raises(EngineStepFailed, match=f"step failed on rank {first}: ") as raised:
        values_of("step", plain(RankDone(3), *answers))
    assert raised.value.end == end
    assert raised.value.echo == (end.how is HowEnded.HEARD)
    assert all(f"rank {rank}: " in str(raised.value) for rank in range(len(errors)))
