"""compile=True leaves argument validation as it was, for the whole process.

torch.compile switches it off when it is first used (torch calls
``Distribution.set_default_validate_args(False)``), so each case runs in an interpreter of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pyro_sde

from ..cases import needs_compiler

BEGIN = """
import pyro, torch, warnings
from torch.distributions import Distribution
from pyro_sde import AutoSDE, MLPControl
from pyro_sde.distributions import ControlledPath, OrnsteinUhlenbeck, SDEPath
from pyro_sde.nn import SDEBlock

warnings.simplefilter("ignore")
times = torch.linspace(0, 1, 2)
prior = OrnsteinUhlenbeck(1.0, 0.0, 0.5, times, torch.zeros(1))
control = MLPControl(1, hidden=(2,), features=1, embedding=1)
before = {before}
Distribution.set_default_validate_args(before)
with torch.no_grad():
"""

COMPILED = {
    "a controlled path": "ControlledPath(prior, control, compile=True).sample()",
    "a controlled path, in chunks": (
        "ControlledPath(SDEPath(lambda t, z: -z, lambda t, z: 1 + z * z, torch.zeros(1), times), "
        "control, compile=True).sample()"
    ),
    "a guide": 'AutoSDE(lambda: pyro.sample("z", prior), control=control, compile=True)()',
    "a block": "SDEBlock(torch.nn.Linear(1, 1), steps=1, compile=True)(torch.ones(1, 1))",
}

END = """
# It was compiled, and not given up silently: else nothing is tested here.
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0 or {gives_up}
found = Distribution._validate_args
assert found is before, f"validation was {{before}} and is {{found}}"
refused = False
try:
    OrnsteinUhlenbeck(1.0, 0.0, -0.5, times, torch.zeros(1))
except ValueError:
    refused = True
assert refused is before, f"a negative scale was refused: {{refused}}"
"""


def run(statement, before, gives_up=False, **environment):
    script = f"{BEGIN}    {statement}\n{END}".format(before=before, gives_up=gives_up)
    root = Path(pyro_sde.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@needs_compiler
@pytest.mark.parametrize("what", COMPILED)
def test_validation_stays_on(what):
    run(COMPILED[what], True)


@needs_compiler
def test_validation_stays_off():
    """What was off is not switched on either."""
    run(COMPILED["a controlled path"], False)


@pytest.mark.parametrize("before", [True, False])
def test_where_compiling_fails(before, tmp_path):
    """Without a C++ compiler ordinary steps are taken, and those of a model are checked too."""
    run(
        COMPILED["a controlled path"],
        before,
        gives_up=True,
        CXX="no-such-compiler",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
    )
