"""The error that all solvers raise."""

__all__ = ["SolutionError"]


class SolutionError(RuntimeError):
    """An equation could not be solved: its solution blows up, or the tolerance cannot be met.

    Example::

        >>> import torch
        >>> from pyro_sde.solvers import SolutionError, integrate
        >>> try:  # 1 / (0.1 - t), and far beyond
        ...     integrate(lambda t, h, w: h**2, torch.tensor([10.0]), None, torch.arange(20.0))
        ... except SolutionError as e:
        ...     print(str(e).split(" at ")[0])
        the solution is not finite
    """
