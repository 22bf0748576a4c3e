from bench.report import met, row


def test_a_figure_meets_its_target_only_on_the_right_side_of_it() -> None:
    less, more = {"target": 15.0, "better": "less"}, {"target": 15.0, "better": "more"}
    at_most = {"target": 15.0, "better": "at most"}
    assert met(15.0, at_most)
    assert not met(15.1, at_most)
    assert met(14.9, less)
    assert not met(15.0, less)
    assert met(15.0, more)
    assert not met(14.9, more)


def test_what_was_not_measured_is_not_met_and_what_has_no_target_is_neither() -> None:
    assert met(None, {"target": 1.0, "better": "less"}) is False
    assert met(3.0, None) is None


def test_a_row_carries_the_target_that_stands_in_the_file() -> None:
    assert row("demo", "first_token_seconds", 3.0, "s").target == 15.0
    assert row("demo", "first_token_seconds", 30.0, "s").met is False
    assert row("demo", "a_metric_without_target", 1.0, "s").target is None
