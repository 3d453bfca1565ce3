"""Collectives among the GPUs of a node, and the memory that they share. Beyond a node: docs/many_gpus.md."""

from __future__ import annotations

from . import custom_all_reduce, process_group, quick_all_reduce, shared_memory
from .custom_all_reduce import *
from .process_group import *
from .quick_all_reduce import *
from .shared_memory import *

__all__: list[str] = []
__all__ += custom_all_reduce.__all__
__all__ += process_group.__all__
__all__ += quick_all_reduce.__all__
__all__ += shared_memory.__all__
