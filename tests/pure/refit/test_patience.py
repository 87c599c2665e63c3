"""Every wait of a sync has an end, and every setting of one is a number of seconds."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from returns.pipeline import is_successful

from rollsync.pure.refit import describe
from rollsync.pure.refit.patience import (
    DEFAULT_REFIT_TIMEOUT_S,
    LONGEST_TIMEOUT_S,
    WAITS_OF_A_STREAM,
    limit_of,
    parse_timeout,
    refit_timeout,
    wait_s,
)
from rollsync.pure.refit.steps import Step

SECONDS = st.floats(min_value=1e-3, max_value=1e6)


@settings(max_examples=60)
@given(st.floats() | st.integers() | st.booleans() | st.text() | st.none())
def test_a_timeout_is_a_positive_number_and_finite(value: object) -> None:
    parsed = parse_timeout("refit_timeout_s", value)
    number = not isinstance(value, bool) and isinstance(value, int | float)
    assert is_successful(parsed) == (number and 0 < float(value) <= LONGEST_TIMEOUT_S)  # type: ignore[arg-type]
    if is_successful(parsed):
        assert math.isfinite(parsed.unwrap())
    else:
        words = describe(parsed.failure())
        assert words.startswith(f"refit_timeout_s is {value!r}: give a positive number of seconds")


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), math.nan, math.inf, -0.0, LONGEST_TIMEOUT_S]
)
def test_the_edges_of_what_can_be_waited_for(value: float) -> None:
    assert is_successful(parse_timeout("x", value)) == (value == LONGEST_TIMEOUT_S)


def test_without_a_setting_there_is_a_deadline() -> None:
    assert refit_timeout({}).unwrap() == DEFAULT_REFIT_TIMEOUT_S
    assert refit_timeout({"refit_timeout_s": 7}).unwrap() == 7.0
    assert not is_successful(refit_timeout({"refit_timeout_s": None}))


@settings(max_examples=30)
@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_every_step_has_a_limit(
    began_s: float, after_s: float, refit_timeout_s: float, step_timeout_s: float
) -> None:
    """A stream may be waited for as a whole, what follows one as any other step."""
    for step, side_done in product(Step, (False, True)):
        limit = limit_of(
            step,
            began_s=began_s,
            side_done_s=began_s + after_s if side_done else None,
            refit_timeout_s=refit_timeout_s,
            step_timeout_s=step_timeout_s,
        )
        streaming = step is Step.TRANSFER and not side_done
        waited_s = WAITS_OF_A_STREAM * refit_timeout_s if streaming else step_timeout_s
        late = side_done and step is Step.TRANSFER
        assert limit.waited_s == waited_s
        assert limit.until_s == (began_s + after_s if late else began_s) + waited_s
        assert bool(limit.since) == late
        assert limit.setting.startswith("refit_timeout_s" if streaming else "step_timeout_s")


@given(SECONDS, st.integers(0, 8))
def test_each_extra_wait_is_a_second_and_never_more_than_a_tenth_of_a_wait(
    refit_timeout_s: float, extra_waits: int
) -> None:
    assert wait_s(refit_timeout_s, 0) == refit_timeout_s
    longer_s = wait_s(refit_timeout_s, extra_waits) - refit_timeout_s
    assert longer_s == pytest.approx(
        extra_waits * min(1.0, refit_timeout_s / 10), rel=1e-3, abs=1e-6
    )
