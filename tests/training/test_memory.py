"""Memory that is kept from gradient to gradient."""

import ctypes
import subprocess
import sys

import pytest

from pyro_sde.training import memory

HELD = """
import ctypes, sys, torch
from pyro_sde.training import keep_memory

class Info(ctypes.Structure):  # mallinfo(3)
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd",
        "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info

def held():
    info = mallinfo()
    return info.arena + info.hblkhd

if sys.argv[1] == "keep":
    assert keep_memory()

before = held()
x = torch.ones(2**24)  # 64 MB
y = [torch.ones(2**18) for _ in range(100)]
full = held()
del x, y
print(full - before, held() - before)
"""


def held(how):
    """What the allocator has of the system more than at first: with tensors, and without them."""
    found = subprocess.run(
        [sys.executable, "-c", HELD, how], check=True, capture_output=True, text=True
    )
    return [int(size) for size in found.stdout.split()]


@pytest.mark.skipif(
    not (sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "mallinfo2")),
    reason="asks the allocator of Linux, glibc 2.33 or later",
)
def test_what_is_freed_is_kept():
    full, after = held("keep")
    assert full > 160 * 2**20 and after >= full
    full, after = held("as it is")
    assert full > 160 * 2**20 and after < full - 64 * 2**20


@pytest.mark.parametrize("platform, library", [("win32", None), ("linux", object())])
def test_where_there_is_no_switch_nothing_happens(platform, library, monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", platform)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: library)
    assert memory.keep_memory() is False
