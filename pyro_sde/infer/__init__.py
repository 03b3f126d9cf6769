"""Inference for path sites: Girsanov's terms and the ELBOs built on them."""

from .annealing import anneal_kl, kl_weight
from .elbo import TraceMeanFieldSDE_ELBO, TraceSDE_ELBO
from .girsanov import GirsanovTerms, girsanov
from .parts import ElboParts, PathParts, record_parts

__all__ = [
    "ElboParts",
    "GirsanovTerms",
    "PathParts",
    "TraceMeanFieldSDE_ELBO",
    "TraceSDE_ELBO",
    "anneal_kl",
    "girsanov",
    "kl_weight",
    "record_parts",
]
