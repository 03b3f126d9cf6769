"""Inference for path sites: Girsanov's terms and the ELBOs built on them."""

from .annealing import anneal_kl, kl_weight
from .elbo import TraceMeanFieldSDE_ELBO, TraceSDE_ELBO
from .elbo_terms import ElboParts, ElboTerms, PathParts, PathTerms, record_parts
from .finite import NonFiniteLoss
from .girsanov import GirsanovTerms, girsanov

__all__ = [
    "ElboParts",
    "ElboTerms",
    "GirsanovTerms",
    "NonFiniteLoss",
    "PathParts",
    "PathTerms",
    "TraceMeanFieldSDE_ELBO",
    "TraceSDE_ELBO",
    "anneal_kl",
    "girsanov",
    "kl_weight",
    "record_parts",
]
