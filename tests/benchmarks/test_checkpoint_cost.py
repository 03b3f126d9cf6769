"""The cost of checkpoints in small: the program runs. No time is judged."""

import checkpoint_cost


def test_a_few_steps(capsys):
    args = checkpoint_cost.parse(["--steps", "4", "--save-every", "2", "--repeats", "2"])
    result = checkpoint_cost.main(args)
    assert {"processor", "clock"} < result.keys() and min(result.values()) > 0
    assert "4 steps, a checkpoint of" in capsys.readouterr().out


def test_it_is_saved_as_often_as_said(tmp_path, monkeypatch):
    saved = []
    real = checkpoint_cost.fit

    def fit(*args, **options):
        saved.append(options.get("save_every"))
        return real(*args, **options)

    monkeypatch.setattr(checkpoint_cost, "fit", fit)
    checkpoint_cost.train(3, 2, tmp_path / "a.pt")
    checkpoint_cost.train(3, 2, None)
    assert saved == [2, None] and (tmp_path / "a.pt.1").exists()
