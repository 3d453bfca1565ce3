"""Time vLLM's layers with this library's kernels and with vLLM's own, on a GPU with vLLM 0.22.

python -m benchmarks.vllm_layers
python -m benchmarks.vllm_layers w4a16:16x28672x4096 sampler:256x128256:kp

A linear layer is kind:MxNxK, where kind is a case of `pyops/integrations/vllm/parts/linear.py`. Its time includes the
quantization of the rows and the GEMM, in CUDA graphs over more than 200 MB of weights. A sampler is
sampler:ROWSxVOCABULARY:LETTERS, with bfloat16 logits: k and p are top-k and top-p, g makes every second request greedy,
l asks for logprobs. It runs without a graph, as in vLLM; its time per call includes host time.

VLLM_USE_FLASHINFER_SAMPLER=0 makes vLLM sample without FlashInfer.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from .products import in_turn, num_sets
from .timing import Call

KINDS = "bf16", "fp8_channel", "fp8_block", "int8", "w4a16", "w8a16"
_SHAPES = (4096, 4096), (4608, 3584), (5120, 2880), (28672, 4096), (4096, 14336), (7168, 16384)  # N, K
ROWS = (
    *(f"{kind}:{m}x{n}x{k}" for kind in KINDS for n, k in _SHAPES for m in (1, 8, 16, 32, 64, 256, 2048)),
    *(
        f"sampler:{rows}x{v}:{what}"
        for v in (32000, 128256, 262144)
        for rows in (1, 16, 64, 256)
        for what in ("", "kp")
    ),
    *(f"sampler:{rows}x128256:{what}" for rows in (1, 64, 256) for what in ("k", "p", "gp", "l")),
)
_CALLS = 200
Build = Callable[..., Call]


@contextmanager
def one_gpu() -> Iterator[None]:
    """Within this context, layers find the parts of vLLM's configuration that they read."""
    import vllm.model_executor.parameter as parameter
    from vllm.config import VllmConfig, set_current_vllm_config

    ranks = mock.patch.multiple(
        parameter, get_tensor_model_parallel_rank=lambda: 0, get_tensor_model_parallel_world_size=lambda: 1
    )
    with ranks, set_current_vllm_config(VllmConfig()):
        yield


def kernels(kind: str) -> list[type]:
    """{name: kernel class} of this library and of vLLM; some may not support the GPU."""
    from vllm.model_executor.kernels import linear as vllms

    from pyops.integrations.vllm.parts import _packed_linear, _scaled_linear

    return {
        "fp8_channel": [_scaled_linear.PyopsFP8ScaledMMLinearKernel, vllms.CutlassFP8ScaledMMLinearKernel],
        "fp8_block": [
            *(_scaled_linear.PyopsFp8BlockScaledMMLinearKernel, vllms.DeepGemmFp8BlockScaledMMKernel),
            *(vllms.CutlassFp8BlockScaledMMKernel, vllms.TritonFp8BlockScaledMMKernel),
        ],
        "int8": [_scaled_linear.PyopsInt8ScaledMMLinearKernel, vllms.CutlassInt8ScaledMMLinearKernel],
        "w4a16": [_packed_linear.PyopsMarlinLinearKernel, vllms.MacheteLinearKernel, vllms.MarlinLinearKernel],
        "w8a16": [
            *(_packed_linear.PyopsMarlinLinearKernel, vllms.MacheteLinearKernel),
            *(vllms.AllSparkLinearKernel, vllms.MarlinLinearKernel),
        ],
    }[kind]


def _parameter(value: Any) -> Any:
    return torch.nn.Parameter(value, requires_grad=False)


def _packed(kernel: Any, bits: int, n: int, k: int) -> tuple[Any, Any]:
    """(kernel, layer) with weights in groups of 128."""
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
    from vllm.scalar_type import scalar_types

    kind = scalar_types.uint4b8 if bits == 4 else scalar_types.uint8b128
    made = kernel(MPLinearLayerConfig((k, n), (k, n), kind, torch.bfloat16, 128, False, False), "q", "s", "z", "g")
    layer, of = torch.nn.Module(), {"input_dim": 0, "output_dim": 1, "weight_loader": lambda *args: None}
    words = torch.randint(-(2**31), 2**31 - 1, (k * bits // 32, n), dtype=torch.int32, device="cuda")
    layer.q = PackedvLLMParameter(data=words, packed_dim=0, packed_factor=32 // bits, **of)
    layer.s = GroupQuantScaleParameter(data=torch.rand(k // 128, n, device="cuda").bfloat16() / 64, **of)
    return made, layer


def _scaled(kernel: Any, kind: str, n: int, k: int) -> tuple[Any, Any]:
    """(kernel, layer) with 8-bit weights."""
    from vllm.model_executor.kernels.linear import FP8ScaledMMLinearLayerConfig, Int8ScaledMMLinearLayerConfig
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    layer, codes = torch.nn.Module(), torch.randint(-100, 101, (n, k), device="cuda")
    names = ["weight", "weight_scale", "input_scale", "input_scale_ub"]
    if kind == "int8":
        layer.weight, layer.weight_scale = _parameter(codes.to(torch.int8)), _parameter(torch.rand(n, 1, device="cuda"))
        layer.input_scale = layer.input_zero_point = layer.azp_adj = None
        layer.logical_widths = [n]
        return kernel(
            Int8ScaledMMLinearLayerConfig(False, True, True), [*names[:3], "input_zero_point", "azp_adj"]
        ), layer
    dtypes = {"weight_shape": (n, k), "input_dtype": torch.bfloat16, "out_dtype": torch.bfloat16}
    weight = codes.float().to(torch.float8_e4m3fn)
    if kind == "fp8_block":
        layer.weight, layer.weight_block_size = _parameter(weight), [128, 128]
        layer.weight_scale_inv = _parameter(torch.rand(-(-n // 128), -(-k // 128), device="cuda"))
        return kernel(FP8ScaledMMLinearLayerConfig(keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym, **dtypes)), layer
    layer.weight, layer.weight_scale = _parameter(weight.T), _parameter(torch.rand(n, 1, device="cuda"))
    return kernel(
        FP8ScaledMMLinearLayerConfig(keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym, **dtypes), names
    ), layer


def contenders(kind: str, m: int, n: int, k: int) -> dict[str, Build]:
    """{kernel: a function that returns a call with `m` rows, for a given weight and rows or for new ones}."""
    if kind == "bf16":
        from vllm.model_executor.layers import utils

        from pyops.integrations.vllm.parts import _dense_linear

        def dense(function: Any) -> Build:
            return lambda weight, x: lambda: function(None, x, weight)

        own = utils.default_unquantized_gemm
        return {"pyops": dense(_dense_linear.unquantized_gemm), "cuBLAS": dense(own)}

    def of(kernel: Any) -> Build:
        def build() -> Call:
            bits = {"w4a16": 4, "w8a16": 8}.get(kind)
            made, layer = _packed(kernel, bits, n, k) if bits else _scaled(kernel, kind, n, k)
            made.process_weights_after_loading(layer)
            x = torch.randn(m, k, device="cuda").bfloat16()
            return lambda: made.apply_weights(layer, x, None)

        return build

    return {kernel.__name__: of(kernel) for kernel in kernels(kind)}


def linear(row: str) -> dict[str, float]:
    """{kernel: microseconds} of a row."""
    kind, _, sizes = row.partition(":")
    m, n, k = map(int, sizes.split("x"))
    nbytes = n * k * {"bf16": 16, "w4a16": 4}.get(kind, 8) // 8

    def operands() -> tuple[Any, ...]:
        if kind != "bf16":
            return ()
        return torch.randn(n, k, device="cuda").bfloat16(), torch.randn(m, k, device="cuda").bfloat16()

    return in_turn(row, contenders(kind, m, n, k), [operands() for _ in range(num_sets(nbytes))])


def sampler(row: str) -> dict[str, float]:
    """{"pyops" and "vLLM": microseconds} of a row."""
    from vllm.v1.sample.sampler import Sampler

    from pyops.integrations.vllm.parts import sampler as part

    sizes, what = row.split(":")[1:]
    rows, vocab = map(int, sizes.split("x"))
    logits, metadata = torch.randn(rows, vocab, device="cuda").bfloat16() * 3, batch(rows, what)
    times: dict[str, list[float]] = {}
    for _ in range(3):
        for name in ("pyops", "vLLM"):
            if name == "pyops":
                part.install()
            times.setdefault(name, []).append(_eager_us(partial(Sampler(), logits, metadata)))
            part.uninstall()
    return {name: statistics.median(found) for name, found in times.items()}


def batch(rows: int, what: str) -> Any:
    """vLLM's sampling metadata for the options in `letters`."""
    from vllm.v1.sample.logits_processor import LogitsProcessors

    t = torch.full((rows,), 0.8, device="cuda")
    if "g" in what:
        t[::2] = 0
    found: dict[str, Any] = {"temperature": t, "all_greedy": False, "all_random": "g" not in what, "generators": {}}
    found["top_k"] = torch.full((rows,), 50, dtype=torch.int32, device="cuda") if "k" in what else None
    found["top_p"] = torch.full((rows,), 0.9, device="cuda") if "p" in what else None
    found |= {"max_num_logprobs": 5 if "l" in what else None, "no_penalties": True, "allowed_token_ids_mask": None}
    found |= {"bad_words_token_ids": {}, "logitsprocs": LogitsProcessors(), "logprob_token_ids": None}
    found |= {"output_token_ids": [], "spec_token_ids": None, "thinking_budget_state_holder": None}
    return SimpleNamespace(**found)


def _eager_us(call: Call) -> float:
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / _CALLS


def main(arguments: Sequence[str]) -> None:
    with torch.no_grad(), one_gpu():
        for row in arguments or ROWS:
            found = (sampler if row.startswith("sampler") else linear)(row)
            print(f"{row}: {', '.join(f'{name} {us:.1f} us' for name, us in found.items())}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
