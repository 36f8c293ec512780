"""Which cases a notebook's lists select for measurement, and the error for a wrong entry."""

import pytest

from t1lib.errors import T1Error
from t1lib.measure.head_cases import OPTIONS, Case, comparison, make_plan, parse_bar

SHAPES = ["A 256 4096 64", "B 8 30 4"]


def test_a_bar_names_its_cases_and_what_they_are_held_against():
    bar = parse_bar("A,B none 512MiB 1.45", ["A", "B"])
    assert (bar.shapes, bar.over, bar.limit) == (("A", "B"), "three", 1.45)
    assert bar.cases() == [Case("fused-none-512MiB", "fused", upstream=True, settings={"workspace": "512MiB"})]
    assert parse_bar("A loss 16MiB 1.08", ["A"]).over == "logits"
    options = parse_bar("A options 1GiB 1.03", ["A"])
    assert options.over == "plain" and [c.option for c in options.cases()] == list(OPTIONS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A both 1GiB", "bad bar"),
        ("C both 1GiB 1.1", "unknown shape"),
        ("A bote 1GiB 1.1", "unknown kind of bar 'bote'.*both"),
        ("A both 1Gib 1.1", "bad size"),
        ("A both 1GiB nan", "above 0"),
    ],
)
def test_a_bad_bar_is_named(text, message):
    with pytest.raises(T1Error, match=message):
        parse_bar(text, ["A", "B"])


def test_a_plan_measures_each_case_once_and_a_change_beside_what_it_changes():
    plan = make_plan(SHAPES, ["full"], ["A,B both 64MiB 1.1", "A half 64MiB 0.6", "A frozen 32MiB 0.7"])
    keys = [case.key for case in plan.cases("A")]
    assert keys == ["full/loss", "full", "fused-64MiB", "fused-half-64MiB", "fused-32MiB", "fused-frozen-32MiB"]
    assert [case.key for case in plan.cases("B")] == ["full/loss", "full", "fused-64MiB"]


@pytest.mark.parametrize(
    ("shapes", "methods", "message"),
    [
        ([], [], "shapes is empty"),
        (["A 1 2 3", "A 4 5 6"], [], "given once"),
        (["A 1 2 0"], [], "shape"),
        (["A/1 1 2 3"], [], "shape"),
        (SHAPES, ["fulll"], "unknown method"),
    ],
)
def test_a_bad_plan_is_refused(shapes, methods, message):
    with pytest.raises(T1Error, match=message):
        make_plan(shapes, methods, [])
    for tight in ("8MiB", "Z 8MiB", "A lots"):
        with pytest.raises(T1Error, match=r"tight|bad size"):
            make_plan(SHAPES, [], [], ["64MiB"], [tight])
    for workspaces in ([], ["lots"], ["0"]):
        with pytest.raises(T1Error):
            comparison([], workspaces)


def test_a_comparison_holds_every_workspace_and_the_first_with_the_filter():
    found = comparison(["cce"], ["64MiB", "32MiB"])
    assert [case.key for case in found] == ["cce/loss", "cce", "fused-64MiB", "fused-32MiB", "fused-filter-64MiB"]
    assert [case.filtered for case in found] == [True, True, False, False, True]
    assert found[-1].settings["workspace"] == "64MiB"


def test_a_tight_workspace_is_measured_on_its_shape_alone():
    plan = make_plan(SHAPES, [], [], ["64MiB"], ["B 8MiB", "M 4MiB"])
    keys = {name: [case.key for case in plan.cases(name)] for name in ("A", "B")}
    assert keys == {"A": ["fused-64MiB"], "B": ["fused-64MiB", "fused-8MiB"]}
    assert [case.key for case in plan.tight_cases("M")] == ["fused-4MiB"]
