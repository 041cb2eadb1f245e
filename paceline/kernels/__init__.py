"""Products of a few rows with packed weights on the CPU, compiled for this machine; what the rest may use of them."""

from paceline.kernels.build import available, notice
from paceline.kernels.matrix import Matrix, in_large_pages
from paceline.kernels.ops import (
    MLP,
    Attention,
    Caches,
    Model,
    Places,
    Projection,
    can_attend,
    can_halve,
    norm,
    product,
    product_twin,
    rows,
)

__all__ = [
    "MLP",
    "Attention",
    "Caches",
    "Matrix",
    "Model",
    "Places",
    "Projection",
    "available",
    "can_attend",
    "can_halve",
    "in_large_pages",
    "norm",
    "notice",
    "product",
    "product_twin",
    "rows",
]
