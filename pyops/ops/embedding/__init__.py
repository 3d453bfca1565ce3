"""Token embeddings: a rank's part of a table, and the ids of n-gram embeddings."""

from __future__ import annotations

from . import n_gram, vocabulary
from .n_gram import *
from .vocabulary import *

__all__: list[str] = []
__all__ += vocabulary.__all__
__all__ += n_gram.__all__
