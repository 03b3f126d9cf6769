"""What can go wrong with a solution, whatever the solver."""

__all__ = ["SolutionError"]


class SolutionError(RuntimeError):
    """An equation was not solved: it blows up, or the tolerance cannot be met."""
