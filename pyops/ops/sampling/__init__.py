"""From logits to tokens: penalties and masks, the largest of a row, softmax, and drawing.

Where the largest of a row are taken, of equal ones the first are. Drawing is by Philox numbers from a seed of each row
and by sums of integers, so that a result depends on nothing but the row and its arguments: not on the rows beside it,
nor on how the work is spread.
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
