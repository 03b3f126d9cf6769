"""What a benchmark has found, kept: a run that was stopped goes on where it was."""

import json
from pathlib import Path
from typing import Any

__all__ = ["Store"]


class Store:
    """Finished runs, one JSON line each, found again by what they were asked to do."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.runs = [json.loads(line) for line in lines]

    def get(self, task: dict[str, Any]) -> dict[str, Any] | None:
        return next((run for run in self.runs if run["task"] == task), None)

    def add(self, run: dict[str, Any]) -> dict[str, Any]:
        self.runs.append(run)
        with self.path.open("a") as file:
            file.write(json.dumps(run) + "\n")
        return run
