"""A checkout beside itself."""

from pathlib import Path

import versus

ROOT = Path(__file__).parent.parent.parent


def test_a_checkout_beside_itself(capsys):
    only = ["--only", "README model, ou", "--repeats", "1", "--seconds", "0"]
    ratios = versus.main(versus.parse([str(ROOT), *only]))
    assert set(ratios) == {f'README model, ou, memory="{m}"' for m in ("graph", "recompute")}
    assert all(ratio > 0 for ratio in ratios.values())
    shown = capsys.readouterr().out
    there, here = (line.partition(": ")[2] for line in shown.splitlines()[:2])
    assert there == here and "changes of file" in here
