"""From logits to tokens: penalties and masks, top-k, softmax, sampling, rejection sampling of drafts.

Each row has its own Philox seed, and token weights are integers, so that their addition is exact. A result depends only
on the row and its arguments: neither on other rows nor on the geometry of the launch.
"""

from __future__ import annotations

from . import draw, penalties, probabilities, rejection, top_k
from .draw import *
from .penalties import *
from .probabilities import *
from .rejection import *
from .top_k import *

__all__: list[str] = []
__all__ += penalties.__all__
__all__ += probabilities.__all__
__all__ += top_k.__all__
__all__ += draw.__all__
__all__ += rejection.__all__
