"""What an encoder reads of each series, and what it says at a time."""

import pickle

import pyro
import pytest
import torch

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.guides import SummaryEncoder
from pyro_sde.guides.encoders import as_observations

from .observed import NAN, D, N, S, assert_same, data, loss_and_gradients, model, shaken


@pytest.mark.parametrize("kind", ["gru", "summary"])
@pytest.mark.parametrize("filler", [NAN, 1e30, -7.0, float("inf")])
def test_masked_entries_have_exactly_no_influence(kind, filler):
    times, values, mask, grid = data()
    encoder = GRUEncoder(D, 8, 4) if kind == "gru" else SummaryEncoder(D, 8, 4, length=N)
    guide = shaken(args=(times, values, mask, grid), encoder=encoder)
    before = loss_and_gradients(model, guide, (times, values, mask, grid))
    spoilt = values.masked_fill(~mask, filler)
    assert_same(before, loss_and_gradients(model, guide, (times, spoilt, mask, grid)))
    moved = torch.where(mask.any(-1), times, grid[:, 1:2])  # a time of padding is no one's
    if kind == "gru":
        assert_same(before, loss_and_gradients(model, guide, (moved, spoilt, mask, grid)))
    # The units were taken from the data, too: from what was observed of it.
    other = GRUEncoder(D, 8, 4)
    other.take_units(as_observations(times, spoilt, mask))
    for unit in ("loc", "scale", "gap"):
        assert torch.equal(getattr(other, unit), getattr(encoder, unit))


def test_nan_is_missing():
    """Without a mask, and beside one."""
    times, values, mask, grid = data()
    guide = shaken(args=(times, values, mask, grid))
    before = loss_and_gradients(model, guide, (times, values, mask, grid))
    holes = values.masked_fill(~mask, NAN)
    assert_same(before, loss_and_gradients(model, guide, (times, holes, None, grid)))
    rows = torch.ones(S, N, dtype=torch.bool)
    assert_same(before, loss_and_gradients(model, guide, (times, holes, rows, grid)))


def elbo_of_each(guide, args):
    torch.manual_seed(7)
    elbo = TraceSDE_ELBO()
    (model_trace, guide_trace), *_ = elbo._get_traces(model, guide, args, {})
    return model_trace.nodes["y"]["log_prob"] - guide_trace.nodes["z"]["log_prob"]


def test_padding_leaves_the_bound_of_each_series():
    times, values, mask, grid = data()
    guide = shaken(args=(times, values, mask, grid))
    before = elbo_of_each(guide, (times, values, mask, grid))
    pad = 3
    padded = (
        torch.cat([times, times[:, -1:].expand(S, pad)], 1),
        torch.cat([values, torch.full((S, pad, D), NAN)], 1),
        torch.cat([mask, torch.zeros(S, pad, D, dtype=torch.bool)], 1),
        grid,
    )
    assert before.shape == (S,)
    torch.testing.assert_close(elbo_of_each(guide, padded), before, rtol=0, atol=1e-9)


def encode(encoder, times, values, mask=None):
    return encoder(*as_observations(times, values, mask))


def test_context_knows_what_is_ahead():
    """The next observation, the time to it and all after it; nothing of what is behind."""
    encoder = GRUEncoder(1, hidden=8, context=3)
    times = torch.tensor([[0.1, 0.4, 0.8]])
    values = torch.randn(1, 3, 1)
    at = torch.tensor([[0.0], [0.2], [0.3], [0.4], [0.6], [0.9]])
    context = encode(encoder, times, values).context(at)
    assert context.shape == (6, 1, 3)

    def changed(times=times, values=values):
        other = encode(encoder, times, values).context(at)
        return (other - context).abs().amax((1, 2)).gt(1e-6).tolist()

    def with_value(i):
        out = values.clone()
        out[0, i] += 1.0
        return out

    assert changed(values=with_value(0)) == [True, False, False, False, False, False]
    assert changed(values=with_value(1)) == [True, True, True, False, False, False]
    assert changed(values=with_value(2)) == [True, True, True, True, True, False]
    assert changed(times=torch.tensor([[0.1, 0.45, 0.8]])) == [True] * 3 + [True, False, False]
    # Of two times before one observation it knows which is the nearer.
    assert (context[1] - context[2]).abs().max() > 1e-6


def test_start_knows_an_observation_at_the_start():
    encoder = GRUEncoder(1, hidden=8)
    times, values = torch.tensor([[0.0, 0.5]]), torch.tensor([[[1.0], [2.0]]])
    start = encode(encoder, times, values).start(torch.zeros(()))
    assert start.shape == (1, 8)
    for i in range(2):
        other = values.clone()
        other[0, i] += 1.0
        moved = encode(encoder, times, other).start(torch.zeros(()))
        assert (moved - start).abs().max() > 1e-6


def test_a_series_alone_and_in_company():
    times, values, mask, grid = data()
    encoder = GRUEncoder(D, 8, 4)
    together = encode(encoder, times, values, mask)
    t = grid.T
    for s in range(S):
        alone = encode(encoder, times[s : s + 1], values[s : s + 1], mask[s : s + 1])
        here = alone.context(t[:, s : s + 1])[:, 0]
        torch.testing.assert_close(here, together.context(t)[:, s], rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 1])
def test_units_of_the_data_do_not_matter(seed):
    """Values and times measured otherwise give the same contexts."""
    times, values, mask, _ = data()
    contexts = []
    for a, b, c in ((1.0, 0.0, 1.0), (100.0, -3.0, 365.0)):
        torch.manual_seed(seed)
        encoder = GRUEncoder(D, 8, 4)
        observations = as_observations(c * times, a * values + b, mask)
        encoder.take_units(observations)
        contexts.append(encoder(*observations).context(c * torch.linspace(0, 1, 7).unsqueeze(-1)))
    torch.testing.assert_close(*contexts)


def test_saving_keeps_the_units(tmp_path):
    args = data()
    guide = shaken(args=args)
    torch.save(guide.state_dict(), tmp_path / "guide.pt")
    copy = pickle.loads(pickle.dumps(guide))
    pyro.clear_param_store()
    other = AutoSDE(model, encoder=GRUEncoder(D, hidden=8, context=4)).setup(*(x[:3] for x in args))
    other.load_state_dict(torch.load(tmp_path / "guide.pt", weights_only=True))
    before = loss_and_gradients(model, guide, args)
    for again in (copy, other):
        pyro.clear_param_store()
        assert_same(before, loss_and_gradients(model, again, args))


BAD = {
    "unsorted": (lambda t, y, m: (t.flip(-1), y, m), r"series 0.*times must increase"),
    "duplicated": (lambda t, y, m: (t[:, :1].expand_as(t), y, m), r"series 0.*twice"),
    "all missing": (
        lambda t, y, m: (t, y, m & (torch.arange(S) != 3).view(-1, 1, 1)),
        "series 3 has no observed value",
    ),
    "outside": (
        lambda t, y, m: (torch.cat([t[:, :-1], t[:, -1:] + 9.0], 1), y, m),
        r"series 1.*times\[3\].*outside \[0, 1\]",
    ),
    "infinite": (lambda t, y, m: (t, y + float("inf"), m), r"series 0.*values\[0, 0\] is inf"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_series_are_named(case):
    times, values, mask, grid = data()
    spoil, message = BAD[case]

    def lenient(times, values, mask, grid):
        with pyro.plate("series", len(times)):
            pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, torch.full((D,), 0.8), grid))

    guide = shaken(lenient, (times, values, mask, grid))
    with pytest.raises(ValueError, match=message):
        guide(*spoil(times, values, mask), grid)
