"""The work of engines in windows of time."""

import numpy as np
import pytest

from bench.loads.engine_loads import LoadSamples, most_over_mean


def test_work_is_reported_for_whole_windows_and_grows_linearly_between_samples() -> None:
    samples = LoadSamples()
    for moment, done in ((0.0, (0, 0)), (10.0, (100, 0)), (20.0, (100, 50)), (29.0, (190, 50))):
        samples.add(moment, done)
    assert samples.windows(10.0, 29.0).tolist() == [[100, 0], [0, 50]]
    assert samples.windows(5.0, 20.0).tolist() == [[50, 0], [50, 0], [0, 25], [0, 25]]


def test_the_most_loaded_engine_is_found_in_any_window() -> None:
    assert most_over_mean(np.array([[10.0, 10.0, 10.0], [30.0, 10.0, 20.0], [0.0, 0.0, 0.0]])) == pytest.approx(1.5)
    assert most_over_mean(np.zeros((2, 3))) is None
