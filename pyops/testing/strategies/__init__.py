"""Strategies for hypothesis that draw difficult arguments. They need torch and hypothesis, the extra ``test``.

Hypothesis draws shapes, layouts, kinds of contents and seeds. Values are generated from the seeds, so that drawing is
fast and the printed failure is short.
"""

from __future__ import annotations

from ..._core.errors import MissingDependencyError

try:
    import hypothesis as _
except ModuleNotFoundError as error:
    if error.name != "hypothesis":
        raise
    raise MissingDependencyError("pyops.testing.strategies", "hypothesis", "test") from None

from .batches import PagedCache, RaggedBatch, paged_caches, ragged_batches
from .tensors import DTYPES, contents, layouts, shapes, tensors
from .weights import FORMATS, QuantisedWeight, quantised_weights

__all__ = [
    "DTYPES",
    "FORMATS",
    "PagedCache",
    "QuantisedWeight",
    "RaggedBatch",
    "contents",
    "layouts",
    "paged_caches",
    "quantised_weights",
    "ragged_batches",
    "shapes",
    "tensors",
]
