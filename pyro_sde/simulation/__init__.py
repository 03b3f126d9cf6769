"""How a path is drawn. A law says what a process is, a simulator how a path of it is computed."""

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
