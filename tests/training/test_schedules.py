"""Learning rates over a training, in units of the largest."""

import pytest

from pyro_sde.training.schedules import make_schedule


def test_schedules():
    cosine, cycle = make_schedule("cosine", 101), make_schedule("one_cycle", 101)
    assert [cosine(i) for i in (0, 50, 100, 101)] == pytest.approx([1, 0.5, 0, 0])
    assert [cycle(i) for i in (0, 30, 100, 101)] == pytest.approx([0.04, 1, 1e-4, 1e-4])
    assert make_schedule("constant", 3)(2) == 1.0 and make_schedule(None, 3)(2) == 0.0
    assert make_schedule("cosine", 1)(0) == 1.0
    with pytest.raises(ValueError, match=r"schedule must be one of constant, cosine.*'up'"):
        make_schedule("up", 3)
