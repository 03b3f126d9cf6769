"""Memory that is kept from gradient to gradient."""

import subprocess
import sys

import pytest

from pyro_sde.training import memory

FAULTS = """
import resource, sys, torch
from pyro_sde.training import keep_memory

if sys.argv[1] == "keep":
    assert keep_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        x = torch.ones(2**24)  # 64 MB, 16,384 pages
        y = [torch.ones(2**18) for _ in range(100)]
        del x, y
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


def faults(how):
    found = subprocess.run(
        [sys.executable, "-c", FAULTS, how], check=True, capture_output=True, text=True
    )
    return int(found.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a switch of Linux")
def test_what_is_freed_is_taken_again():
    """Pages of four times 64 MB are asked for again; or next to none."""
    assert faults("keep") < 1000
    assert faults("as it is") > 4 * 16_000


@pytest.mark.parametrize("platform, library", [("win32", None), ("linux", object())])
def test_where_there_is_no_switch_nothing_happens(platform, library, monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", platform)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: library)
    assert memory.keep_memory() is False
