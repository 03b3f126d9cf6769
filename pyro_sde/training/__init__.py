"""Training with SVI: the loop, checkpoints, and the matching of latents to weighted draws."""

from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .checkpoint_file import CheckpointInUse
from .divergence import Diverged, RejectedWarning
from .fit import fit
from .history import History
from .matching import Matching, match_latents
from .memory import keep_memory

__all__ = [
    "CheckpointError",
    "CheckpointInUse",
    "Diverged",
    "History",
    "Matching",
    "RejectedWarning",
    "fit",
    "keep_memory",
    "load_checkpoint",
    "match_latents",
    "save_checkpoint",
]
