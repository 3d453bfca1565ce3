"""Count the kernels of a decode step of models, without a GPU: the launches that plans make, and torch's operations.

python -m benchmarks.launches
python -m benchmarks.launches --num-seqs 64 --list llama

A model has the layer sizes of a published one. Kernels of a layer are the difference between models of different depth,
so a step has those outside of layers and those of each layer. Counted are launches that the plans of ops make for a
Hopper GPU, and operations of torch that read or write data, each as one kernel; views and new tensors are not counted.
torch's kernels do not overlap with the kernel before them; all kernels of pyops may start early (programmatic launch).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyops._core.launch.kernel import Launch
from pyops._core.op.op import Op
from pyops._core.system import device
from pyops.models import Config, Decoder
from pyops.models.drawing import choose
from pyops.models.kernels import planned
from pyops.models.runner import decode_batch, row_size

_BLOCK_SIZE, _CONTEXT = 16, 4096
# Operations that allocate or only change shapes.
_NEW = "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"
_QUANTIZED = {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "fmt": "e4m3",
    }
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-fp8": _LLAMA | _QUANTIZED,
    "qwen3-moe": _LLAMA
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek": _LLAMA
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
    },
}
Kernels = Counter[tuple[str, str]]  # {("pyops" or "torch", kernel): launches}


class _Torch(TorchDispatchMode):  # type: ignore[misc]
    """Counts torch's operations on data."""

    def __init__(self, found: Kernels) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if func.namespace == "aten" and not func.is_view and name not in _NEW:
            self.found["torch", name] += 1
        return func(*args, **(kwargs or {}))


def step(values: dict[str, Any], num_layers: int, num_seqs: int) -> Kernels:
    """The kernels of a decode step of a model with `num_layers` layers."""
    found: Kernels = Counter()

    def observe(op: Op, launches: list[Launch]) -> None:
        found.update(("pyops", launch.specialisation.kernel.file) for launch in launches)

    config = Config.parse(values | {"num_hidden_layers": num_layers})
    with torch.no_grad():
        decoder = Decoder(config, device="meta")
        decoder.prepare(checked=False)
        cache = decoder.new_cache(num_seqs * _CONTEXT // _BLOCK_SIZE, _BLOCK_SIZE, num_seqs)
        tables = decoder.new_tables(_CONTEXT)
        rows = torch.empty(num_seqs, row_size(config, _CONTEXT, _BLOCK_SIZE), dtype=torch.int64, device="meta")
        starts = torch.empty(num_seqs + 1, dtype=torch.int64, device="meta")
        with planned(device.model("sm_90"), observe), _Torch(found):
            batch = decode_batch(rows, starts, decoder.slot_bytes > 0, starts)
            logits = decoder.step(batch, cache, tables)
            choose(batch.tokens, logits, starts, "greedy")
    return found


def layer_and_rest(values: dict[str, Any], num_seqs: int) -> tuple[Kernels, Kernels]:
    """(the kernels of a layer, those outside of layers)."""
    one, two = (step(values, num_layers, num_seqs) for num_layers in (1, 2))
    return two - one, one - (two - one)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"any of {', '.join(MODELS)}")
    parser.add_argument("--num-seqs", type=int, default=16)
    parser.add_argument("--list", action="store_true", help="name the kernels")
    asked = parser.parse_args(arguments)
    for name in asked.models:
        for what, kernels in zip(("a layer", "the rest"), layer_and_rest(MODELS[name], asked.num_seqs), strict=True):
            torchs = sum(count for (library, _), count in kernels.items() if library == "torch")
            print(f"{name}, {what}: {kernels.total()} kernels, {torchs} of them torch's")
            if asked.list:
                print(
                    "".join(f"    {count} {library}: {kernel}\n" for (library, kernel), count in kernels.items()),
                    end="",
                )


if __name__ == "__main__":
    main()
