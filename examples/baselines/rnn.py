"""A recurrent network that predicts the next point of a series with irregular times."""

import torch
from torch import Tensor, nn
from torch.distributions import Normal


class RNN(nn.Module):
    """From a point and the time to the next, and all before, to the law of the next.

    :param units: By what the values are divided, of shape ``(D,)``, for D = 2 here.
    :param hidden: The width of all layers.
    """

    def __init__(self, units: Tensor, hidden: int) -> None:
        super().__init__()
        self.units = units
        self.gru = nn.GRU(3, hidden, batch_first=True)
        self.out = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 4))

    def forward(self, values: Tensor, gaps: Tensor, state: Tensor | None = None) -> tuple:
        h, state = self.gru(torch.cat([values / self.units, gaps.unsqueeze(-1)], -1), state)
        step, log_scale = self.out(h).chunk(2, -1)
        return Normal(values + self.units * step, log_scale.exp()), state

    def loss(self, times: Tensor, values: Tensor) -> Tensor:
        """Of all points but the first, each given those before: nats a point."""
        law, _ = self(values[:, :-1], times.diff())
        return -law.log_prob(values[:, 1:]).sum(-1).mean()

    @torch.no_grad()
    def predict(self, times: Tensor, values: Tensor, future: Tensor, samples: int) -> Normal:
        """The laws of the points at the times ``future``, each sample after its own draws."""
        values, times = (x.repeat(samples, *[1] * (x.dim() - 1)) for x in (values, times))
        gaps = torch.cat([times, future[:1].expand(len(times), 1)], -1).diff()
        law, state = self(values, gaps)
        found = [(law.loc[:, -1:], law.scale[:, -1:])]
        for gap in future.diff():
            law, state = self(law.sample()[:, -1:], gap.expand(len(values), 1), state)
            found.append((law.loc, law.scale))
        parts = (torch.cat(x, 1) for x in zip(*found, strict=True))
        return Normal(*(x.unflatten(0, (samples, -1)) for x in parts))
