"""Asks elbo_step_jax.py, in an environment with jax that is made where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["NAMES", "Jax", "JaxIsMissing"]

HERE = Path(__file__).parent
VENV = HERE / "out" / "jax-venv"
PACKAGES = ("jax", "diffrax", "equinox")
NAMES = ("diffrax", "diffrax, noise drawn ahead", "hand-written jax scan")


class JaxIsMissing(RuntimeError):
    """jax can be neither found nor installed."""


class Jax:
    """The other process. A context: it ends with it.

    :param threads: How many processors it may use.
    :param double: Compute in double precision.
    """

    def __init__(self, threads: int, double: bool = False) -> None:
        command = [str(python()), str(HERE / "elbo_step_jax.py"), str(threads)]
        env = {"JAX_ENABLE_X64": str(int(double)), "JAX_PLATFORMS": "cpu"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=os.environ | env, text=True, **pipes)
        self.version = self._answer()["version"]

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            self.__exit__()
            raise JaxIsMissing("its process ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"jax: {answer['error']}")
        return answer

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        print(json.dumps({"do": do, **request}), file=self.process.stdin, flush=True)
        return self._answer()

    def __enter__(self) -> "Jax":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def python() -> Path:
    """The interpreter of an environment in which jax can be imported."""
    found = VENV / ("Scripts" if os.name == "nt" else "bin") / "python"
    test = [str(found), "-c", f"import {', '.join(PACKAGES)}"]
    try:
        if not found.exists():
            subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        if subprocess.run(test, capture_output=True).returncode:
            print(f"installing {', '.join(PACKAGES)} into {VENV}", flush=True)
            subprocess.run([str(found), "-m", "pip", "install", "-q", *PACKAGES], check=True)
            subprocess.run(test, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise JaxIsMissing(str(error)) from error
    return found
