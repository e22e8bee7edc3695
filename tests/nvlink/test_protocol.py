"""The protocol of the kernels under many orders of events, and that breaking any of its rules is noticed."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, example, find, given, settings
from hypothesis import strategies as st

from tests.nvlink.protocol import Case, Group, Operation, Rules, Violation
from tests.nvlink.toolchain import needs_gxx

pytestmark = needs_gxx
MANY = settings(deadline=None, max_examples=600, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def cases(draw, kinds: tuple[str, ...] = ("route", "dispatch", "combine")) -> Case:
    size = draw(st.integers(2, 4))
    # All tokens everywhere, some on their own rank alone, or in part nowhere.
    masks = draw(st.sampled_from([st.integers(0, 2**size - 1), st.just(2**size - 1), st.sampled_from([0, 1, 2, 3])]))
    operations = draw(
        st.lists(
            st.builds(
                Operation,
                st.sampled_from(kinds),
                st.tuples(*[st.lists(masks, max_size=7).map(tuple)] * size),
                capacity=st.integers(1, 3),
                segments=st.integers(1, 2),
                workers=st.integers(1, 3),
            ),
            min_size=1,
            max_size=5,
        )
    )
    return Case(tuple(operations), draw(st.integers(0, 2**32)), draw(st.sampled_from([0.02, 0.2, 1.0])))


def dispatches(goes_to: tuple[tuple[int, ...], ...], count: int, **kwargs) -> Case:
    return Case((Operation("dispatch", goes_to, **kwargs),) * count, 0, 1.0)


@MANY
@given(cases())
@example(dispatches(((), ()), 5))
@example(dispatches(((2, 2, 2, 2), ()), 6))  # only one way, so that only credit holds the sender back
@example(dispatches(((1, 1, 1, 1, 2), (0, 0, 0, 2)), 3))  # rounds without items
def test_every_row_reaches_its_reader_and_all_ranks_finish(case):
    Group(case).run()


BROKEN = {
    "lag": (None, 2),
    "granted": (False,),
    "drained_when_read": (False,),
    "empty_rounds_granted": (False,),
    "flags_before_waiting": (False,),
    "home_in_rounds": (False,),
    "grants_itself_last": (False,),
}
KINDS = {"drained_when_read": ("dispatch",), "empty_rounds_granted": ("dispatch",), "home_in_rounds": ("combine",),
         "grants_itself_last": ("combine",)}  # fmt: skip


def test_every_rule_is_tried():
    assert set(BROKEN) == {rule.name for rule in dataclasses.fields(Rules)}
    for name, values in BROKEN.items():
        assert getattr(Rules(), name) not in values


def violation(case: Case, rules: Rules) -> str | None:
    try:
        Group(case, rules).run()
    except Violation as found:
        return str(found)
    return None


@pytest.mark.parametrize(
    ("rule", "value", "kind"),
    [
        (rule, value, kind)
        for rule, values in BROKEN.items()
        for value in values
        for kind in KINDS.get(rule, ("dispatch", "combine"))
    ],
)
def test_a_broken_rule_is_noticed(rule, value, kind):
    rules = dataclasses.replace(Rules(), **{rule: value})
    case = find(
        cases((kind,)),
        lambda case: violation(case, rules) is not None,
        settings=settings(MANY, max_examples=3000, phases=[Phase.generate]),
        random=Random(0),
    )
    assert violation(case, Rules()) is None, "the rule makes the difference"


def test_sums_that_need_no_peer_count_in_their_round_only():
    """Else the grant comes too early, too late or never: three tokens that go nowhere, then one to rank 0."""
    operation = Operation("combine", ((), (0, 0, 0, 1)), workers=2)
    cases = [Case((operation,), seed, 0.2) for seed in range(100)]
    found = {violation(case, dataclasses.replace(Rules(), home_in_rounds=False)) for case in cases}
    assert any("deadlock" in text for text in found - {None})
    assert {violation(case, Rules()) for case in cases} == {None}


@pytest.mark.parametrize("lag", [None, 2])
def test_routing_is_overwritten_without_the_right_credit(lag):
    """Behind an operation in which nobody waits for anybody."""
    route, nothing = Operation("route", ((), ())), Operation("dispatch", ((), ()))
    cases = [Case((route, nothing) * 3, seed, 0.2) for seed in range(200)]
    found = {violation(case, dataclasses.replace(Rules(), lag=lag)) for case in cases}
    assert any("finds routing" in text for text in found - {None})
    assert {violation(case, Rules()) for case in cases} == {None}
