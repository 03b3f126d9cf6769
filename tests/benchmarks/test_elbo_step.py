"""The benchmark of one gradient: its programs compute the same. No time is judged."""

import dataclasses
import json
import math
import subprocess
import sys

import elbo_growth
import elbo_jax
import elbo_step
import pytest
from contestants import BARE, Latent, contestants
from elbo_agree import agree
from elbo_problem import Problem

SMALL = ["--no-compile", "--repeats", "1", "--seconds", "1e-3", "--threads", "1", "--sizes"]
SIZES = [
    Problem(particles=3, dim=2, steps=4, width=5),
    Problem(series=3, particles=2, dim=1, steps=4, width=5, everywhere=True),
    Problem(series=3, dim=2, steps=4, width=5, control="callable"),
]


@pytest.mark.parametrize("problem", SIZES)
def test_programs_agree(problem):
    losses = agree(problem)
    assert len(losses) == 7 and all(map(math.isfinite, losses.values()))


def test_agreement_can_fail(monkeypatch):
    """A prior that does not decay, for torchsde alone."""
    monkeypatch.setattr(Latent, "h", lambda self, t, z: 0 * z)
    with pytest.raises(AssertionError, match="torchsde, adjoint computes something else"):
        agree(SIZES[0])


def test_tables(tmp_path, capsys):
    out = tmp_path / "found.json"
    options = f"sdebnn --sdebnn 2 2 --own 8 2 5 4 --no-jax --growth --growth-sizes 1 2 --out {out}"
    found = elbo_step.main(elbo_step.parse([*SMALL, *options.split()]))
    assert set(found) == {"own", "sdebnn", "growth"}
    assert set(found["own"]["rows"]) == set(contestants(Latent(SIZES[0])))
    assert found["own"]["rows"]["bare PyTorch loop"]["bare"] == 1.0
    assert found["own"]["rows"]["torchsde, tuned"]["tuned"] == 1.0
    assert found["growth"].keys() == elbo_growth.GROWTH.keys()
    assert json.loads(out.read_text())["sdebnn"] == found["sdebnn"]
    printed = capsys.readouterr().out
    assert "left out, as --no-jax says" in printed and "x bare loop" in printed


def test_what_contraction_costs(tmp_path, capsys):
    own = ["--own", "3", "2", "4", "5", "--no-jax", "--contraction"]
    found = elbo_step.main(elbo_step.parse([*SMALL, *own, "--out", str(tmp_path / "found.json")]))
    rows = found["contraction"]
    assert list(rows)[:3] == ["D = 1, diagonal", "D = 4, diagonal", "D = 4, full"]
    assert [name for name, row in rows.items() if "ratio" in row] == ["D = 4, full", "D = 16, full"]
    assert "| D = 4, full |" in capsys.readouterr().out


def test_memory_is_seen():
    """Both hidden layers of every step are kept: 32 MB in single precision."""
    problem = Problem(particles=2000, dim=1, steps=20, width=100)
    request = {"case": (dataclasses.asdict(problem), None), "name": BARE, "threads": 1}
    child = [sys.executable, elbo_growth.__file__, json.dumps(request)]
    out = subprocess.run(child, check=True, capture_output=True, text=True).stdout
    assert 25 < float(out) < 100


SERVER = """import json, sys
print(json.dumps({"version": "0"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"error": "no"} if request["do"] == "fail" else request), flush=True)
"""


def test_jax_process(monkeypatch, tmp_path):
    """One line, one answer; an error of its is one of ours."""
    monkeypatch.setattr(elbo_jax, "python", lambda: sys.executable)
    monkeypatch.setattr(elbo_jax, "HERE", tmp_path)
    (tmp_path / "elbo_step_jax.py").write_text(SERVER)
    with elbo_jax.Jax(1) as jax:
        assert jax.ask("time", name="x", calls=2) == {"do": "time", "name": "x", "calls": 2}
        with pytest.raises(RuntimeError, match="jax: no"):
            jax.ask("fail")
    assert jax.process.returncode == 0


def test_without_jax_the_others_go_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(elbo_jax, "python", lambda: sys.executable)
    monkeypatch.setattr(elbo_jax, "HERE", tmp_path)
    (tmp_path / "elbo_step_jax.py").write_text("")
    own = ["--own", "3", "1", "3", "2", "--out", str(tmp_path / "found.json")]
    found = elbo_step.main(elbo_step.parse([*SMALL, *own]))
    assert "diffrax" not in found["own"]["rows"]
    assert "left out, jax is not to be had (its process ended)" in capsys.readouterr().out
