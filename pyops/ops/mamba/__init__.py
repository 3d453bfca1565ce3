"""State-space models (Mamba): causal convolutions over tokens, and the states that go with them."""

from __future__ import annotations

from . import causal_conv1d, conv_decode, conv_prefill
from .causal_conv1d import *
from .conv_decode import *
from .conv_prefill import *

__all__: list[str] = []
__all__ += causal_conv1d.__all__
__all__ += conv_prefill.__all__
__all__ += conv_decode.__all__
