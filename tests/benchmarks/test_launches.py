"""`benchmarks.launches`: kernels of a decode step, by plans and without a GPU."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import launches


def named(kernels: launches.Kernels) -> Counter[str]:
    """{kernel: launches}, without folders."""
    return Counter({name.rpartition("/")[2].removesuffix(".cu"): count for (_, name), count in kernels.items()})


@pytest.mark.parametrize(
    ("model", "layer"),
    [
        (
            "llama",
            {"gemm_sm90_swap_ab": 4, "qk_norm_rope_insert": 1, "attention_decode": 1, "fused_add_rms_norm": 2},
        ),
        (
            "llama-fp8",
            {"group_quant": 3, "gemm_sm90_swap_ab": 4, "qk_norm_rope_insert": 1}
            | {"attention_decode": 1, "fused_add_rms_norm": 2, "silu_and_mul_per_block_quant": 1},
        ),
        (
            "qwen3-moe",
            {"gemm_sm90_swap_ab": 3, "qk_norm_rope_insert": 1, "attention_decode": 1}
            | {"fused_add_rms_norm": 2, "topk_gating": 1, "moe_align": 1, "grouped_gemm_sm90": 2, "moe_sum": 1},
        ),
        (
            "deepseek",
            {"gemv": 1, "rms_norm": 1, "concat_and_cache_mla_rope_fused": 1, "mla_decode_sm90": 1}
            | {"baddbmm_": 2, "fused_add_rms_norm": 2, "topk_grouped": 1}
            | {"moe_align": 1, "grouped_gemm_sm90": 2, "moe_sum": 1, "gemm_sm90_swap_ab": 5},
        ),
    ],
)
def test_kernels_of_a_layer(model: str, layer: dict[str, int]) -> None:
    """Each kernel once, with those that a fused one replaces absent; and outside of layers only what a step needs."""
    found, rest = (named(one) for one in launches.layer_and_rest(launches.MODELS[model], num_seqs=16))
    assert found == layer
    assert rest == {
        "gather": 1,
        "vocab_parallel_embedding": 1,
        "rms_norm": 1,
        "gemm_sm90_swap_ab": 1,
        "argmax": 1,
    }


def test_command_prints_totals(capsys: pytest.CaptureFixture[str]) -> None:
    launches.main(["llama", "--num-seqs", "1", "--list"])
    text = capsys.readouterr().out
    assert "llama, a layer: 5 kernels, 0 of them torch's" in text
    assert "llama, the rest: 4 kernels, 2 of them torch's" in text
    assert "3 pyops: linear/gemv.cu" in text
