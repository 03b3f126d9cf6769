"""Makes the data set "irregular": one latent Ornstein-Uhlenbeck path seen in three ways."""

import csv

import pyro
import pyro.distributions as dist
import torch

from pyro_sde import datasets, select, time_grid
from pyro_sde.distributions import OrnsteinUhlenbeck

pyro.set_rng_seed(1)
# Hundredths of time in two clusters, with a gap between them.
first = 5 + torch.randperm(115)[:12]
second = 190 + torch.randperm(105)[:12]
t = torch.cat([first, second]).sort().values / 100
grid = time_grid(0.0, 3.0, dt=0.01, include=t)
path = OrnsteinUhlenbeck(1.0, 0.0, 1.2, grid).sample()
z = select(path, grid, t)[:, 0]
value = dist.StudentT(2.0, z, 0.1).sample()
count = dist.Poisson((1.5 + z).exp()).sample().int()
category = dist.Categorical(logits=torch.stack([-2 * z, torch.full_like(z, 0.5), 2 * z], -1))
category = category.sample()

with open(datasets.path("irregular"), "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["t", "value", "count", "category"])
    for row in zip(t.tolist(), value.tolist(), count.tolist(), category.tolist(), strict=True):
        writer.writerow([f"{row[0]:.2f}", f"{row[1]:.4f}", *row[2:]])
