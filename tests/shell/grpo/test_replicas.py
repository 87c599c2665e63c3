"""What replicas do by themselves; what they do together is in `test_client`."""

from __future__ import annotations

import pytest
import torch

from rollsync.shell.grpo.replicas import (
    Meeting,
    Replicas,
    ReplicaUnreachable,
    interface_of,
    weights_digest,
)


def test_a_single_replica_has_the_sum() -> None:
    mine = torch.tensor([1.0, 2.0])
    Replicas().add_up([mine])
    assert mine.tolist() == [1.0, 2.0]


def test_whoever_meets_nobody_says_so() -> None:
    late = Replicas(rank=1, world_size=2, timeout_s=0.2)
    with pytest.raises(ReplicaUnreachable, match="policy worker 1 of 2 did not meet the others"):
        late.join(Meeting("127.0.0.1", 9))


def test_the_digest_is_of_the_bits() -> None:
    module = torch.nn.Linear(3, 2)
    before = weights_digest(module)
    with torch.no_grad():
        module.bias[0] = -0.0
    negative = weights_digest(module)
    with torch.no_grad():
        module.bias[0] = 0.0
    assert len({before, negative, weights_digest(module)}) == 3


def test_interfaces_are_found_by_their_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
