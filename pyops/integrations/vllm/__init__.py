"""This library under vLLM's names: in its namespaces of torch.ops, and as its module `_custom_ops`.

A file imports only files above it:

schemas signature adapters       vLLM's schemas and signatures; a schema read; what takes its arguments where no op does
table stand_ins library          which op serves which; modules for absent libraries; torch.library
choice parts plugin              what is chosen; what vLLM has registries of its own for; what vLLM calls when it starts
refusals                         what ops take in vLLM and refuse here
newer weight_only custom_ops     functions like those of ``vllm._custom_ops``
"""

from __future__ import annotations

from .library import Registration, override, register
from .table import VERSIONS, Entry, table

__all__ = ["VERSIONS", "Entry", "Registration", "override", "register", "table"]
