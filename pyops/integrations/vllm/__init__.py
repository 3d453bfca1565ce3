"""This library under vLLM's names: in vLLM's namespaces of torch.ops, and as its module `_custom_ops`.

A file imports only files above it:

schemas schemas_0_33 signature         vLLM's schemas; their parser
adapters_lora adapters adapters_0_33   functions that adapt an op to another argument order
refusals                               ops, and arguments of ops, that vLLM has and this library refuses
table stand_ins library                which op serves which; modules for absent libraries; torch.library
choice parts plugin                    the switch PYOPS_VLLM; layers and functions other than ops; the entry points
newer weight_only custom_ops           functions like those of ``vllm._custom_ops``
"""

from __future__ import annotations

from .library import Registration, override, register
from .table import VERSIONS, Entry, table

__all__ = ["VERSIONS", "Entry", "Registration", "override", "register", "table"]
