"""How a path is drawn: a law says what a process is, and a simulator computes its paths."""

from .adaptive import Adaptive
from .base import register
from .checkpointed import Checkpointed
from .compiled import Compiled
from .fused import Fused
from .loop import Loop

__all__ = ["Adaptive", "Checkpointed", "Compiled", "Fused", "Loop"]

register(
    adaptive=Adaptive(),
    checkpointed=Checkpointed(),
    compiled=Compiled(),
    fused=Fused(),
    loop=Loop(),
)
