"""Simulation-based calibration: whether the posteriors of simulated data hold the truth as often
as they say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyro
import pyro.util
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from .._buffers import keep_buffers
from ..training.batches import as_arguments
from ..training.interrupt import Interrupt
from .calibration_check import CalibrationCheck
from .calibration_run import CalibrationRun

__all__ = ["sbc"]


def sbc(
    model: Callable,
    guide_factory: Callable,
    data: Any = (),
    *,
    simulations: int = 100,
    draws: int = 99,
    statistics: Mapping[str, Callable[[dict[str, Tensor]], Any]] | None = None,
    to_data: Callable[[dict[str, Tensor]], Any] | None = None,
    seed: int | None = None,
    progress: bool = True,
    **options: Any,
) -> CalibrationCheck:
    """Simulation-based calibration: check a posterior where the truth is known, on simulated data.

    Each simulation draws the latents from the prior and data given them, trains a new guide on the
    data with :func:`~pyro_sde.fit`, and counts how many posterior draws of each latent lie below
    the truth. If the posteriors are exact, these ranks are uniform (Talts et al. 2018). If they
    pile up at both ends, the posterior is too narrow; in the middle, too wide; at the upper end,
    too low.

    Ranks are those of each number of a latent, and of a path at its start, middle and end. A
    posterior that ignored the data and equalled the prior would have uniform ranks, too. So the log
    likelihood of the data is ranked with the latents, which detects that (Modrák et al. 2023).

    ``importance`` checks the posterior of your data, in seconds. ``sbc`` checks model, guide and
    training together, on average over the prior, and finds what weights cannot see: a missed mode,
    or data that the model does not observe as it simulates them. It takes as many trainings as
    there are simulations.

    ``data`` is an example, which gives the shapes, masks and times. The argument that holds the
    observed numbers is replaced by simulated ones, so model, guide and encoder see the same data.
    A model of which that would not be true is refused: one that observes what is not an argument,
    whose prior depends on the data, or that has trainable parameters. Pyro's param store, the
    random state and the buffers of the model are afterwards as they were.

    Ctrl-C keeps the simulations that are complete. One that fails, because its training diverges,
    say, is counted in :attr:`CalibrationCheck.failures`.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_sde.diagnostics import sbc
        >>> def model(y):
        ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(x, 1.0), obs=y)
        >>> def narrow(y):  # the posterior is Normal(y / 2, 0.71)
        ...     pyro.sample("x", dist.Normal(y / 2, 0.35))
        >>> check = sbc(model, lambda model: narrow, torch.tensor(0.0), simulations=50, draws=19,
        ...             steps=0, seed=0, progress=False)
        >>> check.is_right, check.quantities[0].label, check.quantities[0].deviation()
        (False, 'x', 'too narrow')

    With the default guide it is ``sbc(model, AutoSDE, (times, values))``.

    :param model: The model.
    :param guide_factory: What makes a new guide from the model: ``AutoSDE`` or another class of
        autoguides, ``lambda model: AutoSDE(model, encoder=GRUEncoder(...))``, or, for a guide that
        is a function, ``lambda model: guide``.
    :param data: The arguments of the model, as for ``fit``, with observations as an example.
    :param simulations: How many simulations. Each is drawn from a seed of its own, so a larger
        number begins with the same ones.
    :param draws: How many draws of each posterior; ranks are 0 to ``draws``.
    :param statistics: Further quantities to rank, by name: functions of one draw of the latents, a
        dict by site, that return a number or a tensor.
    :param to_data: For models that observe a function of their arguments: from the simulated
        observations, a dict by site, to ``data``.
    :param seed: The seed of everything that is random. By default it is drawn from torch's random
        state.
    :param progress: Whether to show a progress bar.
    :param options: Options of :func:`~pyro_sde.fit`. With ``steps=0`` nothing is trained: that
        checks a guide as it is, such as ``lambda model: trained`` for one that is amortised.
    :returns: A :class:`CalibrationCheck`. Print it, read its fields, or draw it with
        :func:`~pyro_sde.plotting.plot_sbc`.
    """
    for name, value in {"simulations": simulations, "draws": draws}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1: found {value}")
    _check_factory(guide_factory, model)
    _check_options(options)
    if seed is None:
        seed = int(torch.randint(2**31, ()))
    seeds = torch.randint(2**31, (simulations,), generator=torch.Generator().manual_seed(seed))
    args, kwargs = as_arguments(data)
    run = CalibrationRun(
        model, guide_factory, args, kwargs, draws, statistics or {}, to_data, options
    )
    bar = tqdm(seeds.tolist(), desc="sbc", unit="simulation", disable=not progress)
    with bar, _random_state_kept(), keep_buffers(model), Interrupt() as interrupt:
        for i, of_simulation in enumerate(bar):
            pyro.set_rng_seed(of_simulation)
            try:
                if not run.simulate(i) or interrupt.came:
                    break
            except KeyboardInterrupt:
                if not run.ranks:
                    raise
                break
            if run.failures:
                bar.set_postfix(failed=len(run.failures), refresh=False)
    return run.result(simulations)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    state = pyro.util.get_rng_state()
    try:
        yield
    finally:
        pyro.util.set_rng_state(state)


def _check_factory(factory: Any, model: Callable) -> None:
    if isinstance(factory, nn.Module):
        name = type(factory).__name__
        raise TypeError(
            f"guide_factory makes a new guide for each simulation: found a {name}, a guide itself. "
            f"Pass its class, {name}, or lambda model: {name}(model, ...)"
        )
    try:
        inspect.signature(factory).bind(model)
    except TypeError as e:
        raise TypeError(
            f"guide_factory is called with the model, and that fails ({e}): pass AutoSDE, or "
            "lambda model: AutoSDE(model, ...)"
        ) from e


def _check_options(options: dict[str, Any]) -> None:
    for name in ("checkpoint", "resume", "validation"):
        if options.get(name):
            raise TypeError(
                f"sbc trains on many data sets, and {name} belongs to one: leave it out"
            )
