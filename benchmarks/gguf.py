"""Time GEMMs with GGUF weights against vLLM; contenders alternate within one process.

python -m benchmarks.gguf
python -m benchmarks.gguf q4_k:1x4096x4096 q6_k:16x4096x4096

A row is type:MxNxK: a type of GGUF, rows of X and the sizes of the weight. X is bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import pyops
from pyops.example import TorchMaker
from pyops.ops._shared.ggml_formats import FORMATS
from pyops.ops.linear.ggml import random_weight

from .installed import libraries, load_vllm
from .products import in_turn, num_sets
from .timing import Call

ROWS = (
    *(f"q4_k:{m}x4096x4096" for m in (1, 2, 8, 16, 32, 256)),
    *(f"q4_k:{m}x28672x4096" for m in (1, 16)),
    *("q4_k:1x4096x14336", "q6_k:16x4096x4096"),
    *(f"{name}:1x4096x4096" for name in ("q6_k", "q5_k", "q8_0", "q4_0", "q2_k", "iq2_xs")),
)
_VLLM = ("ggml_mul_mat_vec_a8", "ggml_mul_mat_a8")


def measure(row: str) -> dict[str, float]:
    """{contender: median time in microseconds}."""
    name, _, sizes = row.partition(":")
    m, n, k = map(int, sizes.split("x"))
    (quant_type,) = (number for number, format in FORMATS.items() if format.name == name.upper())
    make, format = TorchMaker("cuda"), FORMATS[quant_type]

    def operands() -> tuple[Any, ...]:
        x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
        return random_weight(make, quant_type, n, k), x, quant_type, n

    load_vllm(libraries())
    found: dict[str, Callable[..., Call]] = {"pyops": partial(partial, pyops.ggml_mul_mat_a8)}
    for theirs in _VLLM:
        if hasattr(torch.ops._C, theirs):
            found[f"vLLM's {theirs}"] = partial(partial, getattr(torch.ops._C, theirs))
    nbytes = n * k // format.length * format.nbytes
    return in_turn(row, found, [operands() for _ in range(num_sets(nbytes))])


def main(arguments: Sequence[str] | None = None) -> None:
    for row in arguments or ROWS:
        found = ", ".join(f"{name} {us:.1f} us" for name, us in measure(row).items())
        print(f"{row}: {found}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1:])
