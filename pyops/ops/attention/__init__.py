"""Attention over a paged key-value cache or ragged keys and values; merging of states; sparse patterns."""

from __future__ import annotations

from . import decode, merge, mla, mla_sparse, mqa_logits, partitioned, ragged, sparse, varlen
from .decode import *
from .merge import *
from .mla import *
from .mla_sparse import *
from .mqa_logits import *
from .partitioned import *
from .ragged import *
from .sparse import *
from .varlen import *

__all__: list[str] = []
__all__ += decode.__all__
__all__ += merge.__all__
__all__ += mla.__all__
__all__ += mla_sparse.__all__
__all__ += mqa_logits.__all__
__all__ += partitioned.__all__
__all__ += ragged.__all__
__all__ += sparse.__all__
__all__ += varlen.__all__
