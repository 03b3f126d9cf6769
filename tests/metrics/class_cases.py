"""Four predictions of three classes, with their labels."""

import torch

# Predicted 0, 1, 0, 2 with confidence 0.75, 0.75, 0.5, 1; right, right, wrong, right.
PROBS = torch.tensor(
    [[0.75, 0.25, 0.0], [0.125, 0.75, 0.125], [0.5, 0.25, 0.25], [0.0, 0.0, 1.0]],
    dtype=torch.float64,
)
LABELS = torch.tensor([0, 1, 2, 2])
