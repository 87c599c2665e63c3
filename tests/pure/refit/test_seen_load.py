"""What the events of a load say, for all short loads of a small world: a plan that is made of them
does what the loader does, also with other weights.

The world has one batch of two tensors, `q` and `k`, a parameter that both are put into, one for `q`
alone, scratch, and a stand-in of the first parameter.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.layout import Box
from rollsync.pure.refit.load_events import (
    BatchEnded,
    Changed,
    Copied,
    Filled,
    Found,
    LoadEvent,
    Processed,
    Received,
    Serves,
    StandsIn,
    Used,
    View,
)
from rollsync.pure.refit.load_plan import LoadPlan
from rollsync.pure.refit.seen_load import Promise, plan_seen, seen_load


class M(IntEnum):
    """Memories."""

    BATCH = 1
    QK = 2
    Q_ALONE = 3
    SCRATCH = 4
    STAND_IN = 5
    ELSEWHERE = 6


class At(NamedTuple):
    """Bytes of a memory."""

    memory: M
    start: int
    size: int = 2

    @property
    def view(self) -> View:
        return View(self.memory, self.start, (self.size,), (1,), "uint8", 1)


class Step(NamedTuple):
    """A copy; without a source, a fill; from and to the same place, anything else."""

    target: At
    source: At | None
    is_seen: bool = True


Q, K = At(M.BATCH, 0), At(M.BATCH, 2)
SERVING = {"a.qk": At(M.QK, 0, 4), "b.q": At(M.Q_ALONE, 0)}
NAMES = {M.QK: "a.qk", M.Q_ALONE: "b.q"}
PLAIN = (
    *(Step(At(M.QK, start), source) for start in (0, 2) for source in (Q, K)),
    Step(At(M.Q_ALONE, 0), Q),
    Step(At(M.SCRATCH, 0), Q),
    Step(At(M.QK, 0), At(M.SCRATCH, 0)),
    Step(At(M.QK, 2), At(M.QK, 0)),
    Step(At(M.QK, 2), None),
    Step(At(M.QK, 2), At(M.QK, 2)),
    Step(K, Q),
    Step(Q, None),
    Step(Q, Q),
)
COUNTED = (Step(At(M.STAND_IN, 0), Q), Step(At(M.STAND_IN, 2), K))
SETTLING = (
    *(Step(At(M.SCRATCH, start), source) for start in (0, 2) for source in (Q, K)),
    Step(At(M.QK, 0, 4), At(M.SCRATCH, 0, 4)),
    Step(At(M.QK, 0), At(M.SCRATCH, 0)),
    Step(At(M.QK, 0), Q),
    Step(At(M.SCRATCH, 2), None),
    Step(At(M.SCRATCH, 0), At(M.SCRATCH, 0)),
    Step(K, Q),
)


class Model:
    """The bytes of every memory, with what a loader does to them."""

    def __init__(self) -> None:
        self.bytes = {memory: bytearray(range(16 * memory, 16 * memory + 4)) for memory in M}

    def at(self, place: At) -> bytes:
        return bytes(self.bytes[place.memory][place.start : place.start + place.size])

    def put(self, place: At, contents: bytes) -> None:
        # A stand-in has no elements.
        if place.memory is not M.STAND_IN:
            self.bytes[place.memory][place.start : place.start + place.size] = contents

    def load(self, weights: bytes, steps: Iterable[Step]) -> list[LoadEvent]:
        self.put(At(M.BATCH, 0, 4), weights)
        events: list[LoadEvent] = [Received("q", Q.view), Received("k", K.view)]
        for target, source, is_seen in steps:
            earlier = len(events)
            if source is None:
                self.put(target, bytes(target.size))
                events.append(Filled(target.view, is_zero=True))
            elif source == target:
                self.put(target, bytes(each ^ 0x55 for each in self.at(target)))
                events.append(Used("xor", (target.view,), (target.view,)))
            else:
                contents = self.at(source)
                self.put(target, contents)
                to_serving = target.memory in (M.QK, M.Q_ALONE, M.STAND_IN)
                checksum = contents.hex() if to_serving and source.memory is M.BATCH else ""
                events.append(Copied(target.view, source.view, checksum))
            events = events if is_seen else events[:earlier]
        return [*events, BatchEnded()]

    def replay(self, weights: bytes, plan: LoadPlan) -> None:
        self.put(At(M.BATCH, 0, 4), weights)
        for parameter, region in plan.zeros:
            to = SERVING[parameter]._replace(start=region.offset, size=region.total_bytes)
            self.put(to, bytes(region.total_bytes))
        for name, each in plan.direct.items():
            for copy in each.copies:
                first = (Q if name == "q" else K).start + copy.source.offset
                contents = self.at(At(M.BATCH, first, copy.source.total_bytes))
                to = SERVING[copy.parameter]._replace(start=copy.target.offset, size=len(contents))
                self.put(to, contents)

    def serving(self, plan: LoadPlan) -> dict[str, bytes]:
        """What the parameters hold of the layers that the plan fills."""
        return {name: self.at(at) for name, at in SERVING.items() if name[0] in plan.layers}


def before(*, stands_in: bool, are_buffers: bool = True) -> list[LoadEvent]:
    """Not all of a buffer has to be loaded."""
    serves: list[LoadEvent] = [
        Serves(name, name[0], at.view, are_buffers) for name, at in SERVING.items()
    ]
    return [*serves, StandsIn("a.qk", At(M.STAND_IN, 0, 4).view)] if stands_in else serves


def plan_of(events: Sequence[LoadEvent], model: Model) -> LoadPlan:
    after: list[LoadEvent] = [Found(name, at.view) for name, at in SERVING.items()]
    after += [Changed(name) for name, at in SERVING.items() if model.at(at) != Model().at(at)]
    seen = seen_load([*events, *after])

    def held(promise: Promise) -> str:
        at = SERVING[promise.parameter]
        return model.at(
            at._replace(start=promise.region.offset, size=promise.region.total_bytes)
        ).hex()

    return plan_seen(seen, [held(promise) for promise in seen.promises])


class Outcome(NamedTuple):
    """What a load taught, and what the next load leaves in the parameters that it fills."""

    plan: LoadPlan
    loaded: dict[str, bytes]
    replayed: dict[str, bytes]


def next_load(steps: Sequence[Step], *, stands_in: bool) -> Outcome:
    model, other = Model(), Model()
    events = model.load(bytes([1, 2, 3, 4]), steps)
    other.load(bytes([1, 2, 3, 4]), steps)
    plan = plan_of([*before(stands_in=stands_in), *events], model)
    model.load(bytes([11, 12, 13, 14]), steps)
    other.replay(bytes([11, 12, 13, 14]), plan)
    return Outcome(plan, model.serving(plan), other.serving(plan))


def test_every_short_load_is_replayed_as_it_was_or_left_to_the_loader() -> None:
    direct = set()
    for length in range(4):
        for steps in itertools.product(PLAIN, repeat=length):
            plan, loaded, replayed = next_load(steps, stands_in=False)
            assert replayed == loaded, steps
            direct.add(plan.layers)
    assert direct == {frozenset(each) for each in ("", "a", "b", "ab")}


def test_every_short_way_from_a_stand_in_is_replayed_as_it_was_or_left_to_the_loader() -> None:
    direct = []
    for length in range(4):
        for steps in itertools.product(SETTLING, repeat=length):
            plan, loaded, replayed = next_load((*COUNTED, *steps), stands_in=True)
            assert replayed == loaded, steps
            direct += [steps] if plan.layers else []
    whole, into_scratch = SETTLING[4], {SETTLING[0], SETTLING[3]}
    assert direct
    assert all(set(steps[:2]) == into_scratch and steps[2] == whole for steps in direct)


@given(st.lists(st.sampled_from(PLAIN), max_size=8), st.booleans())
def test_every_longer_load_is_replayed_as_it_was_or_left_to_the_loader(
    steps: list[Step], stands_in: bool
) -> None:
    _, loaded, replayed = next_load(steps, stands_in=stands_in)
    assert replayed == loaded


@given(st.lists(st.sampled_from(SETTLING), max_size=8))
def test_every_longer_way_from_a_stand_in_is_replayed_as_it_was_or_left_to_the_loader(
    steps: list[Step],
) -> None:
    _, loaded, replayed = next_load((*COUNTED, *steps), stands_in=True)
    assert replayed == loaded


def of_one(own: At) -> tuple[Step, ...]:
    """What a loader may do while it has one tensor."""
    return (
        *(Step(to, own) for to in (At(M.QK, 0), At(M.QK, 2), At(M.Q_ALONE, 0), At(M.SCRATCH, 0))),
        Step(At(M.Q_ALONE, 0), At(M.QK, 0)),
        Step(At(M.QK, 2), At(M.Q_ALONE, 0)),
        Step(At(M.QK, 2), At(M.SCRATCH, 0)),
        Step(At(M.QK, 2), None),
        Step(At(M.Q_ALONE, 0), None),
        Step(At(M.Q_ALONE, 0), At(M.Q_ALONE, 0)),
    )


OF_Q, OF_K = of_one(Q), of_one(K)


UNSEEN_OF_Q, UNSEEN_OF_K = (
    (*ways, *(step._replace(is_seen=False) for step in ways)) for ways in (OF_Q, OF_K)
)


def check_left_out(of_q: Sequence[Step], of_k: Sequence[Step], *, are_buffers: bool) -> LoadPlan:
    """What is loaded next, tensor by tensor, without those that the plan leaves out, is what a load
    of all is: also where these led to what has nothing of them."""
    model = Model()
    events = model.load(bytes([1, 2, 3, 4]), (*of_q, *of_k))
    plan = plan_of([*before(stands_in=False, are_buffers=are_buffers), *events], model)
    for directly_first, is_lost in itertools.product((True, False), repeat=2):
        whole, other = Model(), Model()
        for each in (whole, other):
            each.load(bytes([1, 2, 3, 4]), (*of_q, *of_k))
            # An engine that sleeps may lose what it holds.
            for at in SERVING.values() if is_lost else ():
                each.put(at, bytes([8] * at.size))
        following = bytes([11, 12, 13, 14])
        whole.load(following, (*of_q, *of_k))
        if directly_first:
            other.replay(following, plan)
        loaded = {"q": of_q, "k": of_k}.items()
        other.load(following, [s for name, some in loaded if name not in plan.direct for s in some])
        if not directly_first:
            other.replay(following, plan)
        assert [whole.at(at) for at in SERVING.values()] == [
            other.at(at) for at in SERVING.values()
        ], (of_q, of_k)
    return plan


@pytest.mark.parametrize("are_buffers", [False, True])
def test_no_tensor_is_left_out_of_a_short_load_that_led_to_anything_else(
    are_buffers: bool,
) -> None:
    found = set()
    for length in range(4):
        for of_q in range(length + 1):
            ways = (*[OF_Q] * of_q, *[OF_K] * (length - of_q))
            for steps in itertools.product(*ways):
                plan = check_left_out(steps[:of_q], steps[of_q:], are_buffers=are_buffers)
                found.add(tuple(plan.direct))
    assert found == {(), ("q", "k")} | ({("q",), ("k",)} if are_buffers else set())


@pytest.mark.parametrize("are_buffers", [False, True])
def test_no_tensor_is_left_out_that_may_have_led_to_what_was_not_seen(are_buffers: bool) -> None:
    """Before and after everything was loaded, and instead."""
    loaded = ((Step(At(M.QK, 0), Q), Step(At(M.Q_ALONE, 0), Q)), (Step(At(M.QK, 2), K),))
    check = functools.partial(check_left_out, are_buffers=are_buffers)
    found = set()
    for first, last in itertools.product(UNSEEN_OF_Q, UNSEEN_OF_K):
        for of_q, of_k in (((), ()), loaded):
            found.add(tuple(check((first, *of_q), (*of_k, last)).direct))
            found.add(tuple(check((*of_q, first), (last, *of_k)).direct))
    assert {(), ("q", "k")} <= found


@given(
    st.lists(st.sampled_from(UNSEEN_OF_Q), max_size=5),
    st.lists(st.sampled_from(UNSEEN_OF_K), max_size=5),
    st.booleans(),
)
def test_no_tensor_is_left_out_of_a_longer_load_that_led_to_anything_else(
    of_q: list[Step], of_k: list[Step], are_buffers: bool
) -> None:
    check_left_out(of_q, of_k, are_buffers=are_buffers)


FILLED_BY_BOTH = (Step(At(M.QK, 0), Q), Step(At(M.QK, 2), K), Step(At(M.Q_ALONE, 0), Q))


def reason(*events: LoadEvent, steps: Sequence[Step] = FILLED_BY_BOTH) -> str:
    """Why `q` is left to the loader, when these happen before and after a plain load."""
    model = Model()
    load = model.load(bytes([1, 2, 3, 4]), steps)
    first = [each for each in events if isinstance(each, Serves | StandsIn | Processed)]
    last = [each for each in events if each not in first]
    plan = plan_of([*before(stands_in=False), *first, *load, *last], model)
    return plan.tensors["q"].staged_because


def test_a_plain_load_is_direct() -> None:
    assert reason() == ""


ELSEWHERE = At(M.ELSEWHERE, 0)
OTHER_DTYPE = View(M.STAND_IN, 0, (2,), (1,), "float16", 2)


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (Processed("a", "marlin packs it"), "marlin packs it"),
        (Serves("a.other", "a", At(M.QK, 2).view), "shares memory with a.other"),
        (StandsIn("a.qk", At(M.STAND_IN, 0, 4).view), "did not get what was loaded"),
        (StandsIn("a.qk", OTHER_DTYPE), "another form than it is loaded in"),
        (Found("b.q", None), "its memory was replaced"),
        (Found("b.q", At(M.Q_ALONE, 1).view), "its memory was replaced"),
        (Found("b.q", At(M.Q_ALONE, 0, 1).view), "its memory was replaced"),
        (Received("q", Q.view), "it was loaded twice"),
        (Used("mul", (At(M.QK, 0).view,), ()), "mul uses it"),
        (Copied(At(M.QK, 0).view, At(M.SCRATCH, 0).view), ""),
        (Copied(At(M.QK, 1).view, At(M.SCRATCH, 0).view), "it gets something that was computed"),
        (Copied(At(M.QK, 2).view, At(M.QK, 0).view), "parts of it are moved within it"),
        (Copied(At(M.QK, 0).view, At(M.QK, 0).view), ""),
        (Filled(View(M.QK, 0, (2, 2), (1, 2), "uint8", 1), True), "filled in another order"),
        (Filled(At(M.QK, 3, 1).view, True), "not every byte of it is copied exactly once"),
        (Filled(At(M.QK, 3, 1).view, False), "filled with something else than zeros"),
        (Filled(At(M.QK, 3, 0).view, False), ""),
    ],
)
def test_why_a_tensor_is_left_to_the_loader(event: LoadEvent, says: str) -> None:
    if says:
        assert says in reason(event)
    else:
        assert reason(event) == ""


TO_SCRATCH = (Step(At(M.SCRATCH, 0), Q), Step(At(M.SCRATCH, 2), K))
SETTLES = Step(At(M.QK, 0, 4), At(M.SCRATCH, 0, 4))
HALVES = (SETTLING[5], Step(At(M.QK, 2), At(M.SCRATCH, 2)))
CHANGED = Step(At(M.SCRATCH, 0), At(M.SCRATCH, 0))


def why(*steps: Step | LoadEvent, stands_in: bool = True) -> str:
    """Why `q` is left to the loader, when everything holds what was copied to it."""
    events = before(stands_in=stands_in)
    events += [Received("q", Q.view), Received("k", K.view)]
    for step in steps:
        events += Model().load(bytes(4), [step])[2:-1] if isinstance(step, Step) else [step]
    seen = seen_load(events)
    return plan_seen(seen, [each.checksum for each in seen.promises]).tensors["q"].staged_because


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([*COUNTED, *TO_SCRATCH, SETTLES], ""),
        ([*COUNTED, *COUNTED, *TO_SCRATCH, SETTLES], ""),
        ([*COUNTED, *TO_SCRATCH, *HALVES], "rearranged after it is loaded"),
        (
            [
                *COUNTED,
                *TO_SCRATCH,
                Copied(
                    View(M.QK, 0, (2, 2), (2, 1), "uint8", 1),
                    View(M.SCRATCH, 0, (2, 2), (1, 2), "uint8", 1),
                ),
            ],
            "rearranged after it is loaded",
        ),
        ([*COUNTED, *TO_SCRATCH, TO_SCRATCH[0], SETTLES], "changed after it is loaded"),
        ([*COUNTED, *TO_SCRATCH, CHANGED, SETTLES], "xor uses it"),
        (
            [
                *COUNTED,
                *TO_SCRATCH,
                Copied(View(M.SCRATCH, 0, (1,), (1,), "float16", 2), Q.view),
                SETTLES,
            ],
            "converted on its way",
        ),
        ([*COUNTED, SETTLES], "something that was computed"),
        ([*COUNTED, *TO_SCRATCH, SETTLES, Step(ELSEWHERE, Q)], "kept somewhere else too"),
        (
            [
                *(Step(to, K) for to in (At(M.STAND_IN, 0), At(M.STAND_IN, 2))),
                *(Step(to, K) for to in (At(M.SCRATCH, 0), At(M.SCRATCH, 2))),
                SETTLES,
                *(Step(to, Q) for to in (ELSEWHERE, At(M.ELSEWHERE, 2))),
            ],
            "kept somewhere else too",
        ),
    ],
)
def test_what_was_counted_has_to_settle_as_it_is(
    steps: Sequence[Step | LoadEvent], says: str
) -> None:
    found = why(*steps)
    assert says in found
    assert bool(says) == bool(found)


def test_scratch_counts_as_read_by_whoever_has_the_same_counted() -> None:
    """A loader may load a layer once more; what it made then is on its way as what was settled."""
    again = [Step(At(M.ELSEWHERE, each.target.start), each.source) for each in TO_SCRATCH]
    assert why(*COUNTED, *TO_SCRATCH, SETTLES, *again) == ""


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([Step(At(M.SCRATCH, 0), Q)], "kept somewhere else too"),
        ([Copied(At(M.SCRATCH, 0).view, ELSEWHERE.view), PLAIN[6]], "something that was computed"),
        ([Copied(ELSEWHERE.view, At(M.QK, 0).view)], "a copy uses it"),
    ],
)
def test_without_a_stand_in_nothing_comes_through_scratch(
    steps: Sequence[Step | LoadEvent], says: str
) -> None:
    assert says in why(*FILLED_BY_BOTH, *steps, stands_in=False)
    assert why(*FILLED_BY_BOTH, stands_in=False) == ""


def test_a_tensor_of_another_order_and_one_that_comes_twice_are_read_whole() -> None:
    turned = Received("w", View(M.BATCH, 0, (2, 2), (1, 2), "uint8", 1))
    again: list[LoadEvent] = [Received("q", Q.view), BatchEnded(), Received("q", Q.view)]
    assert seen_load([turned]).tensors["w"].reads == (Box((0, 0), (2, 2)),)
    assert seen_load(again).tensors["q"].reads == (Box((0,), (2,)),)


def test_parameters_and_stand_ins_that_are_not_known_change_nothing() -> None:
    assert reason(StandsIn("c", OTHER_DTYPE), Found("c", None), Processed("c", "packed")) == ""


def test_a_tied_parameter_counts_under_its_first_name() -> None:
    model = Model()
    load = model.load(bytes([1, 2, 3, 4]), FILLED_BY_BOTH)
    plan = plan_of(
        [*before(stands_in=False), Serves("c.q", "c", At(M.Q_ALONE, 0).view), *load], model
    )
    assert plan.layers == {"a", "b"}


def test_of_a_load_that_was_not_all_watched_only_what_was_seen_counts() -> None:
    serves = before(stands_in=False, are_buffers=False)
    events = Model().load(bytes(4), [Step(At(M.QK, 0), Q)])
    seen = seen_load([*serves, *events])
    assert plan_seen(seen, None).tensors["q"].reads == (Box((0,), (2,)),)
    assert plan_seen(seen, None).tensors["k"].reads == ()
    assert plan_seen(seen, ["0000"]).tensors["k"].reads == (Box((0,), (2,)),)


def test_a_name_of_the_same_bytes_is_tied_and_one_of_others_is_not() -> None:
    seen = seen_load(
        [Received("q", Q.view), Received("tied", Q.view), Received("k", K.view), BatchEnded()]
    )
    assert (list(seen.tensors), seen.tied) == (["q", "k"], frozenset({"tied"}))
    later = seen_load([Received("q", Q.view), BatchEnded(), Received("k", Q.view)])
    assert (list(later.tensors), later.tied) == (["q", "k"], frozenset())
    assert plan_seen(seen, ()).tied == {"tied"}


def test_what_is_done_with_a_batch_that_is_over_is_not_done_with_its_tensors() -> None:
    used = Used("mul", (Q.view,), (Q.view,))
    (q,) = seen_load([Received("q", Q.view), BatchEnded(), used]).tensors.values()
    assert (q.problem, q.reads) == ("", ())
    (q,) = seen_load([Received("q", Q.view), used, BatchEnded()]).tensors.values()
    assert (q.problem, q.reads) == ("mul uses it", (Box((0,), (2,)),))


MATRIX = View(M.BATCH, 8, (2, 4), (4, 1), "float32", 4)
SERVED = View(M.QK, 0, (2, 4), (4, 1), "float32", 4)


@pytest.mark.parametrize(
    ("read", "boxes"),
    [
        (View(M.BATCH, 8, (2, 4), (4, 1), "float32", 4), [Box((0, 0), (2, 4))]),
        (View(M.BATCH, 16, (2, 2), (1, 4), "float32", 4), [Box((0, 2), (2, 2))]),
        (View(M.BATCH, 24, (16,), (1,), "uint8", 1), [Box((0, 0), (2, 4))]),
        (View(M.BATCH, 8, (2, 2), (4, 2), "float32", 4), [Box((0, 0), (2, 4))]),
        (View(M.BATCH, 4, (1,), (1,), "float32", 4), []),
        (View(M.BATCH, 40, (1,), (1,), "float32", 4), []),
        (View(M.BATCH, 8, (0, 4), (4, 1), "float32", 4), []),
        (View(M.SCRATCH, 8, (2, 4), (4, 1), "float32", 4), []),
    ],
    ids=["all", "turned", "bytes", "gaps", "before", "after", "nothing", "elsewhere"],
)
def test_what_was_read_is_the_box_of_the_view_or_everything(read: View, boxes: list[Box]) -> None:
    (seen,) = seen_load([Received("w", MATRIX), Used("sum", (), (read,))]).tensors.values()
    assert seen.spec == TensorSpec("w", (2, 4), "float32")
    assert list(seen.reads) == boxes


@pytest.mark.parametrize(
    ("source", "target", "is_copied"),
    [
        (MATRIX, SERVED, True),
        (MATRIX, View(M.QK, 0, (2, 1, 4), (4, 4, 1), "float32", 4), True),
        (MATRIX, View(M.QK, 0, (2, 4), (4, 1), "int32", 4), False),
        (MATRIX, View(M.QK, 0, (4, 2), (1, 4), "float32", 4), False),
        (MATRIX, View(M.QK, 0, (2, 4), (4, 1), "float32", 4, is_plain=False), False),
        (View(M.BATCH, 8, (4, 2), (1, 4), "float32", 4), SERVED, False),
        (View(M.BATCH, 24, (2, 4), (4, 1), "float32", 4), SERVED, False),
    ],
)
def test_what_is_a_copy_of_bytes(source: View, target: View, is_copied: bool) -> None:
    seen = seen_load(
        [Serves("p", "layer", SERVED), Received("w", MATRIX), Copied(target, source, "1")]
    )
    assert len(seen.promises) == is_copied
    assert ("converted" in seen.tensors["w"].problem) != is_copied
