"""What is declared is compared before it is sent, tied weights are sent once, and parts arrive."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollsync.pure.refit.layout import Box, Part, part_name
from rollsync.shell.refit.engines.errors import PeerFailed
from rollsync.shell.refit.errors import RefitConfigurationError, WeightMismatch
from tests.shell.refit.engines.pairs import BUCKET_BYTES, Pair, pair, spec_of

FIRST, BIG, LAST = torch.randn(8, 4), torch.randn(3 * BUCKET_BYTES // 4), torch.randn(6, 2)
WEIGHTS = {"first": FIRST, "big": BIG, "last": LAST}
SPECS = [spec_of(*each) for each in WEIGHTS.items()]

backends = pytest.mark.parametrize("backend", ["shm", "nixl"])


@backends
def test_declared_weights_arrive_and_what_is_not_declared_between_them(backend: str) -> None:
    with pair(backend) as ends:
        ends.declare(SPECS)
        sent = [("version", torch.tensor(3)), *WEIGHTS.items(), ("scale", torch.tensor(0.5))]
        for _ in range(2):
            stream = ends.stream(sent)
            stream.raise_first()
            assert list(stream.received[0]) == [name for name, _ in sent]
            assert all(torch.equal(stream.received[0][name], tensor) for name, tensor in sent)


@backends
def test_declarations_that_differ_are_an_error_before_a_weight_is_made(backend: str) -> None:
    with pair(backend) as ends:
        ends.sender.declare_weights(SPECS)
        other = [SPECS[0], spec_of("big", BIG.bfloat16()), SPECS[2]]
        ends.receivers[0].declare_weights(other)
        stream = ends.stream(WEIGHTS.items())
        sent, received = stream.errors
        assert stream.made == []
        assert isinstance(received, WeightMismatch)
        assert received.tensor == "big"
        assert isinstance(sent, PeerFailed)
        for error in (sent, received):
            assert "tensor 1, 'big', is the first whose dtype differs" in str(error)
        ends.declare(SPECS)
        ends.stream(WEIGHTS.items()).raise_first()


@pytest.mark.parametrize("declares", ["the sender", "the receiver", "nobody"])
def test_one_declaration_alone_keeps_nobody_from_sending(declares: str) -> None:
    with pair("shm") as ends:
        ends.sender.declare_weights(SPECS if declares == "the sender" else None)
        ends.receivers[0].declare_weights(SPECS if declares == "the receiver" else None)
        stream = ends.stream(WEIGHTS.items())
        stream.raise_first()
        assert list(stream.received[0]) == list(WEIGHTS)


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        ([("first", FIRST.half())], "first"),
        ([("first", FIRST.t())], "first"),
        ([("big", BIG)], "big"),
        ([("first", FIRST), ("last", LAST)], "last"),
        ([("first", FIRST)], "big"),
        ([("first", FIRST), ("big", BIG), ("last", LAST), ("first", FIRST)], "first"),
    ],
)
def test_a_stream_that_is_not_the_declared_one_is_not_sent(
    sent: list[tuple[str, torch.Tensor]], named: str
) -> None:
    with pair("shm") as ends:
        ends.declare(SPECS)
        stream = ends.stream(sent)
        error, received = stream.errors
        assert isinstance(error, WeightMismatch)
        assert error.tensor == named
        assert isinstance(received, PeerFailed)
        assert named in str(received)


def test_a_declaration_that_no_stream_can_hold_is_refused() -> None:
    with pair("shm") as ends, pytest.raises(RefitConfigurationError, match="'first' comes twice"):
        ends.sender.declare_weights([SPECS[0], SPECS[0]])


@backends
@pytest.mark.parametrize("repeats", [True, False])
def test_a_declared_tie_is_sent_once_however_far_apart_its_names_are(
    backend: str, repeats: bool
) -> None:
    weights = {**WEIGHTS, **({"tied": FIRST} if repeats else {})}
    with pair(backend) as ends:
        ends.declare([spec_of("first", FIRST, "tied"), *SPECS[1:]])
        stream = ends.stream(weights.items())
        stream.raise_first()
        assert torch.equal(stream.received[0]["tied"], FIRST)
        assert stream.received_bytes(0) == FIRST.nbytes + BIG.nbytes + LAST.nbytes


def test_a_tie_of_a_tensor_in_chunks_arrives_with_its_last_chunk() -> None:
    with pair("shm") as ends:
        ends.declare([SPECS[0], spec_of("big", BIG, "tied", "and more"), SPECS[2]])
        stream = ends.stream(WEIGHTS.items())
        stream.raise_first()
        assert list(stream.received[0]) == ["first", "big", "tied", "and more", "last"]
        assert all(torch.equal(stream.received[0][name], BIG) for name in ("tied", "and more"))


def test_a_tie_that_is_not_declared_is_sent_once_inside_a_bucket_and_again_beyond_it() -> None:
    weights = [("first", FIRST), ("near", FIRST), ("big", BIG), ("far", FIRST)]
    with pair("shm") as ends:
        stream = ends.stream(weights)
        stream.raise_first()
        received = stream.received[0]
        assert received["first"] is received["near"]
        assert received["far"] is not received["first"]
        assert all(torch.equal(received[name], tensor) for name, tensor in weights)


def test_a_tie_whose_bytes_are_others_is_a_tensor_of_its_own() -> None:
    memory = torch.zeros(4)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        yield "zero", memory
        yield "minus zero", memory.neg_()
        yield "one", memory.fill_(1)
        yield "ones", memory.view(2, 2)

    with pair("shm") as ends:
        stream = ends.stream(gathered())
        stream.raise_first()
        assert stream.received_bytes(0) == 4 * 16
        assert stream.received[0]["minus zero"].signbit().all()


def whole(tensor: torch.Tensor) -> Box:
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


def test_ranks_of_different_layouts_get_their_parts_and_share_the_buffers() -> None:
    layouts = [
        [Part("first", Box((0, 0), (4, 4))), Part("big", whole(BIG)), Part("last", whole(LAST))],
        [Part("first", Box((4, 0), (4, 4))), Part("last", Box((0, 1), (6, 1)))],
    ]
    with pair("shm", 3) as ends:
        ends.declare(SPECS)
        whole_stream = ends.stream(WEIGHTS.items())
        assert not any(engine.comes_in_parts for engine in ends.receivers)
        for engine, layout in zip(ends.receivers, [*layouts, layouts[1]], strict=True):
            engine.set_target_weight_layout(layout)
            assert engine.get_target_weight_layout() == tuple(layout)
        for version in range(2):
            stream = ends.stream([("version", torch.tensor(version)), *WEIGHTS.items()])
            stream.raise_first()
            one, two, three = stream.received
            assert all(engine.comes_in_parts for engine in ends.receivers)
            assert list(one) == ["version", "first[0:4,0:4]", "big", "last"]
            assert list(two) == list(three) == ["version", "first[4:8,0:4]", "last[0:6,1:2]"]
            assert torch.equal(one["first[0:4,0:4]"], FIRST[:4])
            assert torch.equal(one["big"], BIG)
            for each in (two, three):
                assert torch.equal(each["first[4:8,0:4]"], FIRST[4:])
                assert torch.equal(each["last[0:6,1:2]"], LAST[:, 1:])
            assert stream.received_bytes(1) == 8 + FIRST.nbytes // 2 + LAST.nbytes // 2
        assert whole_stream.received_bytes(1) == sum(each.nbytes for each in WEIGHTS.values())


def test_whole_tensors_come_where_experts_are_not_to_be_sharded() -> None:
    with pair("nixl", 2, shard_expert_weights=False) as ends:
        ends.declare(SPECS)
        for engine in ends.receivers:
            engine.set_target_weight_layout([Part("first", Box((0, 0), (4, 4)))])
            assert engine.get_target_weight_layout() is None
        stream = ends.stream(WEIGHTS.items())
        stream.raise_first()
        assert [list(received) for received in stream.received] == [list(WEIGHTS)] * 2


def test_nixl_reads_the_region_of_a_layout() -> None:
    with pair("nixl", 2) as ends:
        ends.declare(SPECS)
        for engine, start in zip(ends.receivers, (0, 4), strict=True):
            engine.set_target_weight_layout([Part("first", Box((start, 0), (4, 4)))])
        stream = ends.stream(WEIGHTS.items())
        stream.raise_first()
        assert torch.equal(stream.received[0]["first[0:4,0:4]"], FIRST[:4])
        assert torch.equal(stream.received[1]["first[4:8,0:4]"], FIRST[4:])


def test_a_layout_is_of_no_use_to_a_sender_that_declares_nothing() -> None:
    with pair("shm") as ends:
        ends.receivers[0].declare_weights(SPECS)
        ends.receivers[0].set_target_weight_layout([Part("first", Box((0, 0), (4, 4)))])
        stream = ends.stream(WEIGHTS.items())
        stream.raise_first()
        assert not ends.receivers[0].comes_in_parts
        assert list(stream.received[0]) == list(WEIGHTS)


def test_a_layout_of_what_is_not_declared_fails_both_ends() -> None:
    with pair("shm") as ends:
        ends.declare(SPECS)
        ends.receivers[0].set_target_weight_layout([Part("nothing", Box((0,), (4,)))])
        sent, received = ends.stream(WEIGHTS.items()).errors
        assert isinstance(sent, RefitConfigurationError)
        assert isinstance(received, PeerFailed)
        assert "rollout rank 0 wants tensor 'nothing'" in str(received)


@st.composite
def partitions(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """Starts and sizes of the parts of one dimension."""
    cuts = sorted(draw(st.sets(st.integers(0, length), max_size=4)) | {0, length})
    return [(low, high - low) for low, high in itertools.pairwise(cuts)]


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    with pair("shm", 2, bucket_bytes=1024) as ends:
        yield ends


@given(data=st.data(), rows=st.integers(1, 40), columns=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_the_parts_of_any_partition_put_the_tensor_together_again(
    two: Pair, data: st.DataObject, rows: int, columns: int
) -> None:
    tensor = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    spec = spec_of("w", tensor, "tied")
    boxes = [
        Box((row, column), (height, width))
        for row, height in data.draw(partitions(rows))
        for column, width in data.draw(partitions(columns))
    ]
    owners = [data.draw(st.integers(0, 1)) for _ in boxes]
    names = data.draw(st.sampled_from([("w",), ("tied",), ("w", "tied")]))
    two.declare([spec])
    for rank, engine in enumerate(two.receivers):
        engine.set_target_weight_layout(
            [
                Part(name, box)
                for box, owner in zip(boxes, owners, strict=True)
                if owner == rank
                for name in names
            ]
        )
    stream = two.stream([("w", tensor)])
    stream.raise_first()
    assert sum(stream.received_bytes(rank) for rank in (0, 1)) == tensor.nbytes
    for name in names:
        together = torch.full_like(tensor, -1)
        for box, owner in zip(boxes, owners, strict=True):
            part = stream.received[owner][part_name(name, spec, box)]
            (top, left), (height, width) = box.starts, box.sizes
            together[top : top + height, left : left + width] = part
        assert torch.equal(together, tensor)
