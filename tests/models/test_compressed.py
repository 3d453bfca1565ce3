"""DeepSeek-V4: compressed keys that an indexer chooses, states in slots, its files, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from pyops import ModelError, testing
from pyops._core.system import device
from pyops.host.toolchain import toolchains
from pyops.models import Config, Decoder, Engine, SamplingParams, load, serving_kernels
from pyops.models.marlin_experts import MarlinExperts
from pyops.models.runner import Runner
from pyops.models.tensor_parallel import divided
from tests.support.small_models import CASES, SIZES, folders, teacher_forced

FIELDS = Path(__file__).parents[1] / "support" / "model_fields.json"
CASE = "deepseek v4, layers of all kinds, yarn"
TOP_K, COUNT = 3, 20
PROMPTS: list[list[int]] = [[(7 * i) % 160 for i in range(40)], [3], [11, 150, 9]]
PUBLISHED: dict[str, Any] = json.loads(FIELDS.read_text(encoding="utf-8"))["config.json"]["DeepSeek-V4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders(tmp_path_factory)(CASE)


def _rounded(x: Tensor) -> Tensor:
    """Values of e4m3 times a scale for each row."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def _scores(self: Any, query: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
    """transformers' scores with queries and keys in fp8; among equal ones the first is the largest."""
    products = torch.einsum("bshd,btd->bsht", _rounded(query), _rounded(keys)).relu().double()
    scores = torch.einsum("bsht,bsh->bst", products, self.weights_proj(hidden).double())
    return scores - 1e-12 * torch.arange(keys.shape[1])


def test_few_keys_match_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More compressed keys than the indexer chooses; prompts in one batch, whole and in chunks."""
    monkeypatch.setattr(modeling.DeepseekV4IndexerScorer, "forward", _scores)
    texts = []
    for top_k in (TOP_K, 512):
        torch.manual_seed(1)
        sizes = SIZES | CASES[CASE][1] | {"index_n_heads": 8, "index_topk": top_k, "compress_ratios": [4, 4, 0]}
        model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**sizes)).eval()
        texts.append([_text(model, prompt) for prompt in PROMPTS])
        if top_k == TOP_K:
            model.save_pretrained(tmp_path)
    assert texts[0] != texts[1]
    model, params = load(tmp_path), SamplingParams(max_tokens=COUNT)
    for tokens in (8192, 7):
        assert Engine(model, max_seq_len=64, max_num_batched_tokens=tokens).generate(PROMPTS, params) == texts[0]


def _text(model: Any, prompt: list[int]) -> list[int]:
    return model.generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False)[0, len(prompt) :].tolist()


def test_states_of_others_are_not_read(folder: Path) -> None:
    """Slots begin with NaN; preempted sequences are recomputed, and so is one that steps back."""
    model, params = load(folder), SamplingParams(max_tokens=12)
    expected = [Engine(model, max_seq_len=64).generate([prompt], params)[0] for prompt in PROMPTS]
    engine = Engine(model, num_blocks=15, block_size=4, max_seq_len=64, max_num_batched_tokens=9, max_num_seqs=3)
    for kept in engine._runner.cache:
        for states in kept[3:]:
            states.view(torch.uint8).fill_(255)
    assert engine.generate(PROMPTS, params) == expected
    assert engine.preemptions
    request = engine.add(PROMPTS[2], params)
    found = [engine.step()[0].token for _ in range(8)]
    engine.step_back(request, len(PROMPTS[2]) + 5)
    found[5:] = [output.token for output in engine.run()]
    assert found == expected[2]


@pytest.mark.rotates
@pytest.mark.skipif(not toolchains(), reason="no C++ compiler")
def test_kernels_generate_the_same_tokens() -> None:
    """On the host backend, which checks every access: prefill in chunks, then padded decode steps."""
    sizes = {"num_hidden_layers": 2, "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"]}
    sizes |= {"compress_rate_hca": 3, "num_hash_layers": 1, "hc_sinkhorn_iters": 2, "sliding_window": 3}
    values = SIZES | CASES[CASE][1] | sizes | {"hidden_size": 16, "num_attention_heads": 2, "moe_intermediate_size": 8}
    model = Decoder(Config.parse(values | {"architectures": ["DeepseekV4ForCausalLM"]})).randomise(3, scale=2.0)
    prompts, params = [[1, 2, 3, 4, 5, 6, 7], [7, 8], [9]], SamplingParams(max_tokens=3)
    options = {"max_seq_len": 16, "max_num_seqs": 4, "max_num_batched_tokens": 6, "block_size": 4}
    expected = Engine(model, **options).generate(prompts, params)
    with testing.cpu("kernels"):
        assert Engine(model, **options).generate(prompts, params) == expected


def test_logits_of_bfloat16(folder: Path) -> None:
    """Against the same weights in float32; queries and keys are inserted by an op of their own."""
    found = {}
    for dtype in ("bfloat16", "float32"):
        model = load(folder, dtype=dtype)
        if dtype == "float32":
            for tensor in model.tensors().values():
                tensor.copy_(tensor.bfloat16() if tensor.is_floating_point() else tensor)
        found[dtype] = teacher_forced(Runner(model, 4, 16, 2, 64), PROMPTS[0], [5, 9, 33, 4, 8]).float()
    error = found["bfloat16"] - found["float32"]
    assert error.square().mean().sqrt() < 0.05 * found["float32"].square().mean().sqrt()


@pytest.mark.rotates
def test_every_kernel_is_found_without_weights() -> None:
    values = SIZES | CASES[CASE][1] | {"architectures": ["DeepseekV4ForCausalLM"], "dtype": "bfloat16"}
    limits = {"max_num_seqs": 2, "max_model_len": 32, "max_num_batched_tokens": 16}
    found = {op.name for op, _ in serving_kernels(Config.parse(values), device.model(), **limits)}
    needed = {"compress_kv", "sparse_mla_attention", "mhc_fused_post_pre", "hc_head", "topk_softplus_sqrt"}
    assert needed | {"fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert"} <= found


def test_published_config() -> None:
    """A published file is read as transformers reads it."""
    theirs = transformers.DeepseekV4Config.from_dict(PUBLISHED)
    values = json.loads(json.dumps(theirs.to_dict())) | {"architectures": PUBLISHED["architectures"]}
    assert Config.parse(PUBLISHED) == Config.parse(values)
    main, compress = (Config.parse(PUBLISHED).layer_ropes[i] for i in (0, 1))
    assert (main.kind, compress.kind, compress.attention_factor) == ("default", "yarn", 1.0)
    rope = modeling.DeepseekV4RotaryEmbedding(theirs)
    for ours, kind in ((main, "main"), (compress, "compress")):
        torch.testing.assert_close(ours.frequencies(512), getattr(rope, f"{kind}_inv_freq"), rtol=2**-21, atol=0.0)


def test_published_names(folder: Path, tmp_path: Path) -> None:
    """Tensors by DeepSeek's names, with those of multi-token prediction."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        found[name.replace(".attn.norm.", ".attn.kv_norm.")] = tensor
    save_file(found | {"mtp.0.attn.wq_a.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    ours, theirs = (load(one).tensors() for one in (tmp_path, folder))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# As in config.json of DeepSeek-V4-Flash, where expert_dtype is next to it.
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0"}
FP8 |= {"weight_block_size": [128, 128]}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
PROJECTIONS = ["wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3"]


def _fp4(shape: torch.Size) -> tuple[dict[str, Tensor], Tensor]:
    """A random weight: the bytes and power-of-two scales of a file, and its values."""
    quants, scales = torch.randint(0, 16, shape), torch.randint(119, 124, (shape[0], shape[1] // 32))
    values = torch.where(quants < 8, 1.0, -1.0) * E2M1[quants % 8] * 2.0 ** (scales - 127).repeat_interleave(32, 1)
    packed = (quants[:, ::2] | quants[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    return {"weight": packed, "scale": scales.to(torch.uint8).view(torch.float8_e8m0fnu)}, values


def _fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The same of a given weight, in blocks of 128 x 128."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    largest = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax((1, 3))
    scales = 2.0 ** (largest / 448).log2().ceil()
    expanded = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    quants = (weight / expanded).to(torch.float8_e4m3fn)
    return {"weight": quants, "scale": scales.to(torch.float8_e8m0fnu)}, quants.float() * expanded


def _published(plain_folder: Path, fp8: bool, **sizes: Any) -> Path:
    """A folder with DeepSeek's names, dtypes and shapes; the other folder gets the same values in float32."""
    torch.manual_seed(6)
    config = transformers.DeepseekV4Config(**SIZES | CASES[CASE][1] | sizes)
    transformers.DeepseekV4ForCausalLM(config).save_pretrained(plain_folder)
    file, tensors = plain_folder / "model.safetensors", {}
    plain, values = load_file(file), json.loads((plain_folder / "config.json").read_text())
    for name, tensor in list(plain.items()):
        module, _, kind = name.rpartition(".")
        is_projection = kind == "weight" and module.endswith(tuple(PROJECTIONS)) and "compressor" not in module
        found = {kind: tensor}
        if ".experts." in name and kind == "weight":
            found, plain[name] = _fp4(tensor.shape)
        elif is_projection and fp8:
            found, plain[name] = _fp8(tensor)
        module = module.removeprefix("model.").replace("embed_tokens", "embed").replace("lm_head", "head")
        tensors |= {f"{module}.{kind}".replace("hc_head.hc_", "hc_head_"): one for kind, one in found.items()}
    save_file(plain, file, {"format": "pt"})
    folder = plain_folder / "published"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    method = FP8 if fp8 else FP8 | {"modules_to_not_convert": PROJECTIONS}
    values |= {"expert_dtype": "fp4", "quantization_config": method}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_tokens_of_fp4_experts_match_those_of_their_values(tmp_path: Path) -> None:
    """In bfloat16, which has every fp4 value. Experts stay packed; those of other sizes are dequantised, exactly."""
    folder = _published(tmp_path, fp8=False, intermediate_size=128, num_hidden_layers=2)
    models = [load(one, dtype="bfloat16") for one in (tmp_path, folder)]
    assert isinstance(models[1].layers[0].mlp.weights, MarlinExperts)
    params = SamplingParams(max_tokens=COUNT)
    texts = [Engine(model, max_seq_len=64).generate(PROMPTS, params) for model in models]
    assert texts[0] == texts[1]
    small = tmp_path / "small"
    plain, ours = (load(one, dtype="bfloat16") for one in (small, _published(small, fp8=False)))
    assert plain.tensors().keys() < ours.tensors().keys()
    for layers in zip(plain.layers, ours.layers, strict=True):
        one, other = (layer.mlp.weights for layer in layers)
        assert torch.equal(one.gate_up.weight, other.gate_up.weight)
        assert torch.equal(one.down.weight, other.down.weight)


def test_published_weights_match_the_dequantised_model(tmp_path: Path) -> None:
    """fp4 experts and fp8 in blocks, with power-of-two scales, up to the quantisation of activations.

    With float32 scales of the same values the logits have the same bits.
    """
    sizes = {"hidden_size": 128, "q_lora_rank": 128, "o_lora_rank": 128, "intermediate_size": 128}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 4}  # rounding must not change the choice
    folder, following = _published(tmp_path, fp8=True, **sizes), [5, 9, 33, 4, 8]
    model = transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([PROMPTS[0] + following])).logits[0, len(PROMPTS[0]) - 1 :]
    ours = teacher_forced(Runner(load(folder, dtype="bfloat16"), 4, 16, 2, 64), PROMPTS[0], following).float()
    assert ((ours - theirs).norm(dim=1) <= 0.16 * theirs.norm(dim=1)).all()
    tensors = load_file(folder / "model.safetensors")
    floats = {name: one.float() for name, one in tensors.items() if name.endswith(".scale") and ".experts." not in name}
    assert floats
    save_file(tensors | floats, folder / "model.safetensors")
    again = teacher_forced(Runner(load(folder, dtype="bfloat16"), 4, 16, 2, 64), PROMPTS[0], following).float()
    assert torch.equal(again, ours)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 256}, "head_dim: expected 512, got 256"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: expected 1, got 2"),
        ({"qk_rope_head_dim": "x"}, "qk_rope_head_dim: expected a positive integer"),
        ({"rope_scaling": [1]}, "rope_parameters: expected an object"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim: expected 64, got 32"),
        ({"hc_mult": 3}, "hc_mult: expected 1 or 2 or 4, got 3"),
        ({"compress_ratios": [0, 8, 128]}, "compress_ratios: expected 3 of 0, 4, 128"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types: expected 3 of sliding_attention or"),
        ({"o_groups": 3}, "o_groups: expected a divisor of num_attention_heads=4, got 3"),
        ({"index_head_dim": 32}, "index_head_dim: expected at least 64, got 32"),
        ({"scoring_func": "sigmoid"}, "scoring_func: expected 'sqrtsoftplus', got 'sigmoid'"),
        ({"norm_topk_prob": False}, "norm_topk_prob: expected true"),
        ({"n_shared_experts": 2}, "n_shared_experts: expected 1, got 2"),
        ({"expert_dtype": "int8"}, "expert_dtype: expected 'fp4', 'fp8' or null, got 'int8'"),
        ({"expert_dtype": "fp4"}, "quantization_config: expected fp8 with an expert_dtype, got None"),
        ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types: expected 3 of hash_moe or moe"),
        ({"num_hash_layers": -1}, "num_hash_layers: expected a number of layers, got -1"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: expected fp8 or None"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Config.parse(PUBLISHED | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"streams": None}, "streams: expected hyper-connections with compressed attention"),
        ({"head_dim": 256}, "compressed: expected one of 3 layers and heads of 512"),
        ({"mixture": None}, "mixture: expected experts in every layer"),
    ],
)
def test_configs_that_do_not_fit_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(Config.parse(PUBLISHED), **options)


def test_refusals_of_an_engine() -> None:
    model = Decoder(Config.parse(PUBLISHED), "float32", "meta")
    with pytest.raises(ModelError, match="kv_cache_dtype: expected 'auto' or 'float32', got 'fp8'"):
        model.new_cache(2, 16, 1, "fp8")
    with pytest.raises(ModelError, match="block_size: expected a multiple of the 4 tokens of a compressed key, got 6"):
        model.new_cache(2, 6, 1)
    with pytest.raises(ModelError, match="layer_types: expected attention to all tokens with tensor parallelism"):
        divided(model.config, 2)
