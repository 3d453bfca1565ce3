"""vLLM's MLA layer on this library's backends, against torch's attention."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.vllm_attention import BLOCK_SIZE, attention, block_tables, common_metadata, cuda_platform

LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
NUM_BLOCKS, TABLE_WIDTH, WORKSPACE = 40, 64, 96
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NAME = "layers.0.attn"


@pytest.fixture(scope="module", autouse=True)
def platform() -> Iterator[Any]:
    """A CUDA platform with this library's ops under vLLM's names."""
    from pyops.integrations.vllm import custom_ops

    with cuda_platform() as device, pytest.MonkeyPatch.context() as patch:
        from vllm import _custom_ops

        for name in ("gather_and_maybe_dequant_cache", "merge_attn_states"):
            patch.setattr(_custom_ops, name, getattr(custom_ops, name))
        for name in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8"):  # asked for at imports
            patch.setattr(_custom_ops, name, lambda capability: False)
        zeros = torch.zeros  # without a GPU no memory can be pinned
        patch.setattr(torch, "zeros", lambda *size, pin_memory=False, **more: zeros(*size, **more))
        yield device


class Projection(torch.nn.Module):
    """The up-projection of keys and values, with the interface of vLLM's linear layers."""

    quant_method = None

    def __init__(self, num_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.randn(num_heads * (NOPE + VALUE), LATENT) * LATENT**-0.5
        self.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.T, None


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.attention import mla_attention

    from pyops.integrations.vllm.parts._latent_attention import LatentMetadataBuilder, LatentPrefillBackend

    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda config: LatentPrefillBackend)
    size = staticmethod(lambda config: WORKSPACE)
    monkeypatch.setattr(LatentMetadataBuilder, "determine_chunked_prefill_workspace_size", size)
    found = VllmConfig()
    with set_current_vllm_config(found):
        yield found


def make_layer(config: Any, num_heads: int, dtype: torch.dtype, cache: str) -> Any:
    from vllm.config import CacheConfig
    from vllm.model_executor.layers.attention import MLAAttention

    from pyops.integrations.vllm.parts._latent_attention import LatentBackend

    torch.manual_seed(0)
    sizes = {"kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE}
    config.model_config = SimpleNamespace(
        dtype=dtype,
        get_num_attention_heads=lambda parallel: num_heads,
        get_head_size=lambda: LATENT + ROPE,
        hf_text_config=SimpleNamespace(**sizes),
    )
    config.cache_config = CacheConfig(block_size=BLOCK_SIZE, cache_dtype=cache)
    layer = MLAAttention(
        num_heads,
        (NOPE + ROPE) ** -0.5,
        q_lora_rank=None,
        kv_b_proj=Projection(num_heads, dtype),
        cache_config=config.cache_config,
        prefix=NAME,
        attn_backend=LatentBackend,
        **sizes,
    )
    layer.impl.dcp_world_size = 1  # otherwise read from vLLM's process groups, which do not exist here
    layer.process_weights_after_loading(dtype)
    shape = LatentBackend.get_kv_cache_shape(NUM_BLOCKS, BLOCK_SIZE, 1, LATENT + ROPE, cache)
    codes = cache.startswith("fp8")
    layer.kv_cache = torch.full(shape, 0x7E if codes else torch.nan, dtype=torch.uint8 if codes else dtype)
    return layer


def run(layer: Any, config: Any, common: Any, q: torch.Tensor, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """[tokens, num_heads, VALUE] of one step, with metadata by the backend's builder."""
    from vllm.forward_context import set_forward_context
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=LATENT + ROPE, dtype=q.dtype)
    builder = layer.attn_backend.get_builder_cls()(spec, [NAME], config, torch.device("cpu"))
    metadata = {NAME: builder.build(0, common)}
    with set_forward_context(metadata, config, slot_mapping={NAME: common.slot_mapping}):
        out = layer(q, c, r[:, None], output_shape=torch.Size((len(q), layer.num_heads * VALUE)))
    return out.view(len(q), layer.num_heads, VALUE)


def drawn(tokens: int, num_heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, latents and rotated keys."""
    sizes = (tokens, num_heads, NOPE + ROPE), (tokens, LATENT), (tokens, ROPE)
    return tuple(torch.randn(size).to(dtype) for size in sizes)


def expected(layer: Any, q: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """The newest tokens of one sequence, with a cache of `entries` [length, LATENT + ROPE]."""
    weight = layer.kv_b_proj.weight.double().view(layer.num_heads, NOPE + VALUE, LATENT)
    latents, rotated = entries.double().split((LATENT, ROPE), 1)
    nope, values = torch.einsum("hdl,jl->jhd", weight, latents).split((NOPE, VALUE), 2)
    keys = torch.cat((nope, rotated[:, None].expand(-1, layer.num_heads, -1)), 2)
    return attention(q, keys, values, layer.scale)


def stored(x: torch.Tensor, layer: Any) -> torch.Tensor:
    """x after a round trip through the cache."""
    if not layer.kv_cache_dtype.startswith("fp8"):
        return x
    return (x.float() / layer._k_scale_float).to(torch.float8_e4m3fn).double() * layer._k_scale_float


def set_scale(layer: Any, scale: float) -> None:
    layer._k_scale.fill_(scale)
    layer._k_scale_float = scale


@pytest.mark.parametrize("num_heads", [16, 3])
@pytest.mark.parametrize(
    ("dtype", "cache", "scale"),
    [
        (torch.bfloat16, "auto", 1.0),
        (torch.float16, "float16", 1.0),
        (torch.bfloat16, "fp8", 1.0),
        (torch.bfloat16, "fp8", 0.03),
    ],
)
def test_decode(config: Any, num_heads: int, dtype: torch.dtype, cache: str, scale: float) -> None:
    """One new token after the cached ones, also as the first of a sequence."""
    layer = make_layer(config, num_heads, dtype, cache)
    set_scale(layer, scale)
    lengths = [30, 1, 65, 16]
    tables = block_tables(lengths, TABLE_WIDTH, NUM_BLOCKS)
    tokens = sum(lengths)
    q, c, r = drawn(tokens, num_heads, dtype)
    common = common_metadata(lengths, lengths, tables)
    layer.impl.do_kv_cache_update(c, r[:, None], layer.kv_cache, common.slot_mapping, cache, layer._k_scale)
    last = torch.tensor(lengths).cumsum(0) - 1
    out = run(layer, config, common_metadata([1] * 4, lengths, tables), q[last], c[last], r[last])
    for s, entries in enumerate(torch.cat((c, r), 1).split(lengths)):
        right = expected(layer, q[last[s], None], stored(entries, layer))
        torch.testing.assert_close(out[s, None].double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_decode_returns_lse_for_context_parallelism(config: Any) -> None:
    """Ranks that share sequences get queries in one tensor, and the log-sum-exp is returned."""
    layer = make_layer(config, 4, torch.float16, "auto")
    layer.impl.need_to_return_lse_for_decode = True
    _, c, r = drawn(20, 4, torch.float16)
    tables = block_tables([20], TABLE_WIDTH, NUM_BLOCKS)
    slots = common_metadata([20], [20], tables).slot_mapping
    layer.impl.do_kv_cache_update(c, r[:, None], layer.kv_cache, slots, "auto", layer._k_scale)
    query = torch.randn(1, 4, LATENT + ROPE).half() / 4
    decode = SimpleNamespace(seq_lens=torch.tensor([20], dtype=torch.int32), block_table=tables)
    out, lse = layer.impl.forward_mqa(query, layer.kv_cache, SimpleNamespace(decode=decode), layer)
    logits = query[0].double() @ torch.cat((c, r), 1).double().T * layer.scale
    torch.testing.assert_close(lse[0].double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[0].double(), logits.softmax(-1) @ c.double(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("dtype", "cache"), [(torch.bfloat16, "auto"), (torch.float16, "auto"), (torch.bfloat16, "fp8")]
)
def test_prompts_with_decode_tokens(config: Any, dtype: torch.dtype, cache: str) -> None:
    """Prompts; then the rest of two of them after chunks of cached tokens, with single tokens.

    vLLM takes at most WORKSPACE cached tokens at a time: the second step takes several chunks, and the shorter sequence
    has no tokens in the last one.
    """
    layer = make_layer(config, 4, dtype, cache)
    steps = [[20, 37, 150, 70, 5], [1, 1, 12, 30, 9]]
    tables = block_tables([sum(counts) for counts in zip(*steps, strict=True)], TABLE_WIDTH, NUM_BLOCKS)
    old = [torch.empty(0, LATENT + ROPE, dtype=torch.float64) for _ in tables]
    for counts in steps:
        lengths = [len(entries) + count for entries, count in zip(old, counts, strict=True)]
        q, c, r = drawn(sum(counts), 4, dtype)
        out = run(layer, config, common_metadata(counts, lengths, tables), q, c, r)
        new = torch.cat((c, r), 1)
        for s, (rows, entries, result) in enumerate(zip(*(x.split(counts) for x in (q, new, out)), strict=True)):
            # A prompt attends to its own tokens unrounded, and to cached tokens as the cache rounds them.
            own = stored(entries, layer) if counts[s] == 1 else entries.double()
            right = expected(layer, rows, torch.cat((old[s], own)))
            torch.testing.assert_close(result.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
            old[s] = torch.cat((old[s], stored(entries, layer).double()))


@pytest.fixture
def installed(platform: Any, config: Any) -> Iterator[None]:
    from pyops.integrations.vllm.parts import attention as part

    assert "MLA" in part.install()
    yield
    part.uninstall()


def choice(platform: Any, **config: Any) -> str:
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = {"dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, "use_mla": True} | config
    found = platform.get_attn_backend_cls(None, AttentionSelectorConfig(head_size=576, **config), num_heads=16)
    return str(found.rpartition(".")[2])


@pytest.mark.parametrize("more", [{}, {"kv_cache_dtype": "fp8", "block_size": 64}, {"dtype": torch.float16}], ids=str)
def test_backend_is_chosen(installed: None, platform: Any, more: dict[str, Any]) -> None:
    assert choice(platform, **more) == "LatentBackend"


@pytest.mark.parametrize(
    ("more", "other"),
    [
        ({"kv_cache_dtype": "float16"}, "TritonMLABackend"),
        ({"use_sparse": True, "kv_cache_dtype": "fp8_ds_mla"}, "FlashMLASparseBackend"),
        ({"use_batch_invariant": True}, "TritonMLABackend"),
    ],
    ids=str,
)
def test_backend_is_not_chosen(installed: None, platform: Any, more: dict[str, Any], other: str) -> None:
    assert choice(platform, **more) == other


def test_prefill_is_chosen_until_it_is_uninstalled(platform: Any, config: Any) -> None:
    from vllm.v1.attention.backends.mla.prefill import get_mla_prefill_backend

    from pyops.integrations.vllm.parts import attention as part

    config.model_config = SimpleNamespace(dtype=torch.bfloat16, hf_text_config=SimpleNamespace())
    part.install()
    assert get_mla_prefill_backend(config).get_name() == "PYOPS"
    part.uninstall()
    with pytest.raises(ValueError, match="No valid MLA prefill backend"):  # vLLM's own need compiled libraries
        get_mla_prefill_backend(config)


def test_page_size_is_64(platform: Any) -> None:
    from pyops.integrations.vllm.parts._latent_attention import LatentBackend

    assert LatentBackend.get_preferred_block_size(16) == 64
    assert LatentBackend.supports_block_size(16)
    assert not LatentBackend.supports_block_size(24)
