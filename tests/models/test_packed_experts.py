"""Models with packed experts (AWQ, GPTQ, pack-quantized, mxfp4) against the same weights dequantised."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

import pyops
from pyops import SCALAR_TYPES, ModelError, testing
from pyops._core.system import device
from pyops.example import ArgMaker
from pyops.host.toolchain import toolchains
from pyops.models import Engine, Mixture, PackedQuantization, SamplingParams, load
from pyops.models.expert_weights import PackedAsPlain, PlainExperts
from pyops.models.experts import Experts
from pyops.models.marlin_experts import MarlinExperts, serves
from tests.models.test_experts import mxfp4_model
from tests.models.test_packed import AWQ, GPTQ, Case, check_text, compressed, packed_weight, tensors_of
from tests.models.test_quantized import COUNT, PROMPT

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 4,  # all of them, because rounding would change a choice between near-equals
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {"n_routed_experts": 4, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1, "kv_lora_rank": 32}
LATENT |= {"q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
LATENT |= {"num_key_value_heads": 4, "moe_intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 64, "head_dim": 16, "norm_topk_prob": True},
    "DeepseekV3": LATENT,
}
# {format: (family, quantization_config, format of the experts)}
FORMATS: dict[str, tuple[str, dict[str, Any], type]] = {
    "awq": ("Mixtral", AWQ | {"modules_to_not_convert": ["gate"]}, MarlinExperts),
    "awq, latent attention": ("DeepseekV3", AWQ | {"group_size": 16}, MarlinExperts),
    "gptq": ("Qwen3Moe", GPTQ | {"sym": True}, MarlinExperts),
    "gptq, act-order": ("Mixtral", GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"}, MarlinExperts),
    "gptq, zero points": ("Qwen3Moe", GPTQ | {"group_size": -1}, MarlinExperts),
    "gptq, 8 bits, zero points": ("Qwen3Moe", GPTQ | {"bits": 8}, PackedAsPlain),
    "gptq, 3 bits, act-order": ("Mixtral", GPTQ | {"bits": 3, "desc_act": True}, PackedAsPlain),
    "packed": ("Qwen3Moe", compressed(), MarlinExperts),
    "packed, zero points, order": ("Mixtral", compressed(symmetric=False, actorder="group"), MarlinExperts),
    "packed, 8 bits, channels": (
        "Mixtral",
        compressed(num_bits=8, strategy="channel", group_size=None),
        MarlinExperts,
    ),
}
WITH_TOKENS = ("awq", "awq, latent attention", "gptq, act-order", "packed, zero points, order")
PROJECTION = re.compile(r".*(_proj|_mqa|\.w[123])\.weight")


def saved(model: Any, folder: Path) -> dict[str, Tensor]:
    """The tensors that transformers writes for a model: experts one by one, under the names of checkpoints."""
    model.save_pretrained(folder)
    return safetensors.torch.load_file(folder / "model.safetensors")


def write(tensors: dict[str, Tensor], folder: Path, **more: Any) -> Path:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(whole, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | more))
    return folder


@cache
def model_of(family: str) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**SIZES | MODELS[family])
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.fixture
def case_of(tmp_path: Path) -> Callable[[str], Case]:
    """A packed model in the folder tmp_path / "packed"."""

    def made(kind: str, change: Callable[[dict[str, Tensor]], None] | None = None) -> Case:
        family, config, _ = FORMATS[kind]
        tensors = saved(model_of(family), tmp_path / "plain")
        weights = config.get("config_groups", {"group_0": {"weights": {}}})["group_0"]["weights"]
        bits, given = weights.get("num_bits", config.get("bits")), weights.get("group_size", config.get("group_size"))
        symmetric = weights.get("symmetric", config.get("sym", False))
        order = config.get("desc_act") or weights.get("actorder") == "group"
        packs: dict[str, Tensor] = {}
        for name in filter(PROJECTION.fullmatch, list(tensors)):
            columns = tensors[name].shape[1]
            size = columns if given in (None, -1) else given
            one = packed_weight(tensors[name], bits, size, torch.bfloat16, symmetric, order)
            tensors[name] = one.values.T
            packs |= tensors_of(name.removesuffix(".weight"), one, config)
        folder = write(tensors, tmp_path / "plain")
        dequantised = type(model_of(family)).from_pretrained(folder, dtype=torch.float32).eval()
        kept = {name: tensor.bfloat16() for name, tensor in tensors.items() if not PROJECTION.fullmatch(name)}
        model_of(family).save_pretrained(tmp_path / "packed")
        write(kept | packs, tmp_path / "packed", quantization_config=config, dtype="bfloat16")
        return Case(config, kept | packs, dequantised)

    return made


def check_experts(layer: Experts, module: Any) -> None:
    """A layer's results equal those of a transformers module in float32.

    Up to two GEMMs, an activation and a sum, each rounded to bfloat16.
    """
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights, ids = layer._choice(x)
    with torch.no_grad():
        found, expected = layer.weights(x, weights, ids), module(x.float(), ids.long(), weights)
    assert (found.float() - expected).abs().max() <= 2.0**-6 * expected.abs().max()


@pytest.mark.parametrize("kind", FORMATS)
def test_tokens_and_layers_match_the_dequantised_model(
    kind: str, case_of: Callable[[str], Case], tmp_path: Path
) -> None:
    case = case_of(kind)
    model = load(tmp_path / "packed")
    for layer, theirs in zip(model.layers, case.dequantised.model.layers, strict=True):
        if isinstance(layer.mlp, Experts):
            assert type(layer.mlp.weights) is FORMATS[kind][2]
            check_experts(layer.mlp, theirs.mlp.experts)
    if kind in WITH_TOKENS:
        (text,) = Engine(model, max_seq_len=96, max_num_seqs=1).generate([PROMPT], SamplingParams(max_tokens=COUNT))
        check_text(case, text, torch.bfloat16)


def test_mxfp4_stays_packed_where_activations_have_16_bits(tmp_path: Path) -> None:
    """With gpt-oss's biases and activation. In float32 it is decoded: tests/models/test_experts.py."""
    theirs = mxfp4_model(tmp_path, experts_per_token=3)
    model = load(tmp_path, dtype="bfloat16")
    for layer, module in zip(model.layers, theirs.model.layers, strict=True):
        assert isinstance(layer.mlp, Experts)
        assert isinstance(layer.mlp.weights, MarlinExperts)
        check_experts(layer.mlp, module.mlp.experts)
    (text,) = Engine(model, max_seq_len=96, max_num_seqs=1).generate([PROMPT], SamplingParams(max_tokens=COUNT))
    check_text(Case({}, {}, theirs), text, torch.bfloat16)
    with pytest.raises(ModelError, match="prepare: expected one call"):
        model.prepare()


WRONG: dict[str, tuple[str, str, Callable[[Tensor], Tensor], str]] = {
    "groups of gate and up": (
        "gptq, act-order",
        "w3.g_idx",
        lambda order: order.flip(0),
        r"experts\.1\.w3\.g_idx: expected the groups of w1",
    ),
    "groups of two sizes": (
        "gptq, act-order",
        "w2.g_idx",
        lambda order: order.clamp(min=1),
        r"experts\.1\.w2\.g_idx: expected 2 groups of one size",
    ),
    "zero points beyond codes": (
        "gptq, zero points",
        "gate_proj.qzeros",
        lambda zeros: zeros | 15,
        r"gate_proj\.qzeros: expected zero points up to 15, got 16",
    ),
    "zero points of symmetric codes": (
        "gptq",
        "gate_proj.qzeros",
        lambda zeros: zeros + 1,
        "qzeros: expected zero points in the middle of the quantized range, as with sym",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_sizes_that_marlin_cannot_hold_are_refused(what: str, case_of: Callable[[str], Case], tmp_path: Path) -> None:
    kind, name, change, message = WRONG[what]
    tensors = case_of(kind).tensors
    (key,) = (key for key in tensors if ".layers.1." in key and key.endswith(f"experts.1.{name}"))
    write(tensors | {key: change(tensors[key])}, tmp_path / "packed")
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "packed")


def test_unquantized_experts(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """All of a layer's, or none."""
    case = case_of("awq")
    plain = safetensors.torch.load_file(tmp_path / "plain" / "model.safetensors")
    at = "model.layers.1.block_sparse_moe.experts"
    tensors = {name: tensor for name, tensor in case.tensors.items() if not name.startswith(at)}
    tensors |= {name: tensor.bfloat16() for name, tensor in plain.items() if name.startswith(at)}
    for left, expected in ((f"{at}", PlainExperts), (f"{at}.1", None)):
        config = case.config | {"modules_to_not_convert": [left]}
        write(tensors, tmp_path / "packed", quantization_config=config)
        if expected is None:
            with pytest.raises(ModelError, match="all or none of the experts of model"):
                load(tmp_path / "packed")
        else:
            kinds = [type(layer.mlp.weights) for layer in load(tmp_path / "packed").layers]
            assert kinds == [MarlinExperts, PlainExperts]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group_size", [8, 16, 32, 48, 64, 128, 192, -1])
def test_weights_stay_packed_where_kernels_read_them(bits: int, has_zeros: bool, group_size: int) -> None:
    """By the plans for Hopper, at small and large M. Other plans dequantise all weights at every call."""
    experts, k, n, top_k = 8, 384, 128, 2
    quantization = PackedQuantization("gptq", bits, group_size, is_symmetric=not has_zeros)
    mixture = Mixture(num_experts=experts, top_k=top_k, intermediate_size=k, renormalize=True, layers=(True,))
    kind = SCALAR_TYPES[f"uint{bits}" if has_zeros else f"uint{bits}b{1 << bits - 1}"]
    op, groups = pyops.registry["moe_wna16_marlin_gemm"], k // quantization.columns_of_group(k)
    make = ArgMaker(device.model("sm_90"), op.name)
    kernels = []
    for num_tokens, block in ((1, 8), (1024, 64)):
        rows, blocks = num_tokens * top_k, experts + num_tokens * top_k // block
        args = (
            make.empty(num_tokens, k, dtype="bfloat16"),
            make.empty(rows, n, dtype="bfloat16"),
            make.empty(experts, k // 16, n * bits // 2, dtype="int32"),
            make.empty(experts, n, dtype="bfloat16"),
            make.empty(experts, groups, n, dtype="bfloat16"),
            None,
            None,
            make.empty(experts, groups, n * bits // 32, dtype="int32") if has_zeros else None,
            *(None, None, None),
            make.empty(blocks * block, dtype="int32"),
            make.empty(blocks, dtype="int32"),
            make.empty(1, dtype="int32"),
            make.empty(rows, dtype="float32"),
            *(block, top_k, True, kind.id, num_tokens, n, k),
            *(True, False, True, False, -1, -1, -1),
        )
        kernels += [launch.specialisation.kernel.file for launch in op.launches(*args)]
    reads = "linear/dequantize_packed.cu" not in kernels
    assert reads == serves(quantization, mixture, k, torch.bfloat16)


def test_biases_that_gptq_adds(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """Biases of zeros are ignored; others match no tensor of the architecture and are refused."""
    tensors, name = case_of("gptq").tensors, "model.layers.1.mlp.experts.1.gate_proj.bias"
    write(tensors | {name: torch.zeros(64).half()}, tmp_path / "packed")
    assert name not in load(tmp_path / "packed").tensors()
    write(tensors | {name: torch.ones(64).half()}, tmp_path / "packed")
    with pytest.raises(ModelError, match="bias: is no tensor of this architecture"):
        load(tmp_path / "packed")


@pytest.mark.slow
@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
def test_warmup_compiles_all_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host: loading, prompts and decode steps launch only kernels that `warmup` compiled; tokens are those of
    the references."""
    mxfp4_model(tmp_path)
    write(safetensors.torch.load_file(tmp_path / "model.safetensors"), tmp_path, dtype="bfloat16")
    prompts, limits = [[1, 2, 3, 4, 5, 6], [7, 8]], {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8}

    def texts() -> list[list[int]]:
        return Engine(load(tmp_path), max_seq_len=16, **limits).generate(prompts, SamplingParams(max_tokens=3))

    with testing.cpu("kernels"):
        assert pyops.warmup(model=tmp_path, max_model_len=16, **limits)
        monkeypatch.setenv("PYOPS_JIT", "error")
        found = texts()
    monkeypatch.delenv("PYOPS_JIT")
    assert found == texts()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_tokens_on_a_gpu(kind: str, case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """The tokens of the CPU; decode steps replay graphs."""
    case = case_of(kind)
    engine = Engine(load(tmp_path / "packed", "cuda"), max_seq_len=96, max_num_seqs=2)
    for text in engine.generate([PROMPT, PROMPT], SamplingParams(max_tokens=COUNT)):
        check_text(case, text, torch.bfloat16)


@pytest.mark.gpu
def test_mxfp4_on_a_gpu(tmp_path: Path) -> None:
    theirs = mxfp4_model(tmp_path, experts_per_token=3)
    engine = Engine(load(tmp_path, "cuda", "bfloat16"), max_seq_len=96, max_num_seqs=2)
    for text in engine.generate([PROMPT, PROMPT], SamplingParams(max_tokens=COUNT)):
        check_text(Case({}, {}, theirs), text, torch.bfloat16)
