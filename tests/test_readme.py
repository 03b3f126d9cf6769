"""Every Python block of the README runs, one after the other, as written."""

import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"


def test_blocks_run():
    torch.set_default_dtype(torch.float32)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert namespace["paths"].shape == (100, len(namespace["grid"]))
