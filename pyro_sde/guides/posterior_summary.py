"""Posterior quantiles of the latents of a guide, and the summary of a guide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..predictive import Predictive

if TYPE_CHECKING:
    from ..diagnostics.summary import Summary

__all__ = ["PosteriorSummaryMixin"]


class PosteriorSummaryMixin:
    """A mixin of :class:`~pyro_sde.AutoSDE` with methods that do not change the guide."""

    path_sites: tuple[str, ...]
    other_sites: tuple[str, ...]
    _example: tuple[tuple, dict] | None = None
    """The arguments that the guide was set up with."""
    setup: Any

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """As that of every torch module; the guide must have been set up before.

        :returns: What torch returns, the keys that did not match.
        """
        if not self.path_sites:
            raise RuntimeError(
                f"{type(self).__name__} has no parameters to load into yet: they are made from "
                "the model's arguments. Call guide.setup(*args) with the data first, and then "
                "load_state_dict"
            )
        return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    @torch.no_grad()
    def quantiles(
        self,
        quantiles: Any,
        *args: Any,
        num_samples: int = 1000,
        parallel: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """Posterior quantiles of each latent, by sampling.

        :param quantiles: Numbers between 0 and 1.
        :param num_samples: How many posterior samples.
        :param parallel: Whether to draw them at once; by default, where the model allows it.
        :returns: A dict from site names to tensors with one leading entry per quantile, and then
            the shape of one draw.
        """
        self.setup(*args, **kwargs)
        sites = (*self.path_sites, *self.other_sites)
        guide: Any = self
        draw = Predictive(guide, num_samples=num_samples, return_sites=sites, parallel=parallel)
        samples = draw(*args, **kwargs)
        result = {}
        for name, value in samples.items():
            q = torch.as_tensor(quantiles, dtype=value.dtype, device=value.device)
            result[name] = torch.quantile(value, q, dim=0)
        return result

    def median(
        self, *args: Any, num_samples: int = 1000, parallel: bool | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Posterior medians of each latent, by sampling; for a path, at each time.

        :param args: Arguments of the model.
        :param num_samples: How many posterior samples.
        :param parallel: Whether to draw them at once; by default, where the model allows it.
        :param kwargs: Keyword arguments of the model.
        :returns: A dict from site names to tensors of the shape of one draw.
        """
        return self.quantiles(0.5, *args, num_samples=num_samples, parallel=parallel, **kwargs)

    def summary(self, *args: Any, num_particles: int = 10, bins: int = 4, **kwargs: Any) -> Summary:
        """A summary to print: the sites, their grids, the parameters, the KL by site and by time,
        and one line of the importance check (:func:`~pyro_sde.diagnostics.importance`).

        Neither the guide nor the random state is changed. There is a warning if a KL has exploded.

        Example::

            >>> import pyro, pyro.distributions as dist
            >>> from pyro_sde import AutoSDE
            >>> from pyro_sde.distributions import OrnsteinUhlenbeck
            >>> pyro.clear_param_store()
            >>> def model(y):
            ...     z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, torch.linspace(0, 1, 9)))
            ...     pyro.sample("y", dist.Normal(z[..., -1, 0], 0.1), obs=y)
            >>> print(str(AutoSDE(model).setup(torch.tensor(1.0)).summary()).split("\\n\\n")[0])
            AutoSDE
            site  role      distribution       batch  event   steps  from  to  dt
            ------------------------------------------------------------------------
            z     path      OrnsteinUhlenbeck  ()     (9, 1)  8      0     1   0.125
            y     observed  Normal             ()     ()

        :param args: Arguments of the model; by default those of :meth:`setup` or the first call.
        :param num_particles: How many draws to average the KL over.
        :param bins: The number of equal spans of time in which to show the KL of a path.
        :param kwargs: Keyword arguments of the model.
        :returns: The summary. Print it, or read its fields.
        """
        from ..diagnostics.summary import summarise  # it needs the ELBO, which needs the guides

        if not args and not kwargs:
            if self._example is None:
                raise ValueError(
                    f"{type(self).__name__} has not seen the model's arguments: call "
                    "guide.setup(...) first, or guide.summary(...) with them"
                )
            args, kwargs = self._example
        return summarise(self, args, kwargs, num_particles, bins)
