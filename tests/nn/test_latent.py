"""The MLA layer against transformers' attention of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from pyops.nn import MultiHeadLatentAttentionWrapper, RotaryEmbedding, latent
from pyops.nn.latent import MLAModules

HEADS = 4


def attention(q_lora_rank: int | None, kv_lora_rank: int, rope: int) -> Any:
    torch.manual_seed(3)
    config = transformers.DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=16,
        qk_rope_head_dim=rope,
        v_head_dim=12,
        attn_implementation="eager",
    )
    return deepseek.DeepseekV3Attention(config, 0).eval(), deepseek.DeepseekV3RotaryEmbedding(config)


def layer_of(theirs: Any, rope: int) -> MultiHeadLatentAttentionWrapper:
    """A layer with the weights of transformers' module."""
    fused = None
    if theirs.q_lora_rank is not None:
        fused = torch.nn.Linear(32, theirs.q_lora_rank + theirs.kv_lora_rank + rope, bias=False)
        fused.weight.data = torch.cat((theirs.q_a_proj.weight, theirs.kv_a_proj_with_mqa.weight))
    modules = MLAModules(
        kv_a_layernorm=theirs.kv_a_layernorm,
        kv_b_proj=theirs.kv_b_proj,
        rotary_emb=RotaryEmbedding(rope, rope, 64, 10000, False, torch.float32),
        o_proj=theirs.o_proj,
        fused_qkv_a_proj=fused,
        kv_a_proj_with_mqa=theirs.kv_a_proj_with_mqa,
        q_a_layernorm=theirs.q_a_layernorm,
        q_b_proj=theirs.q_b_proj,
        q_proj=theirs.q_proj,
    )
    sizes = 16, rope, 12, theirs.q_lora_rank, theirs.kv_lora_rank
    return MultiHeadLatentAttentionWrapper(32, HEADS, (16 + rope) ** -0.5, *sizes, modules)


@pytest.mark.parametrize("forward", ["forward_native", "forward_cuda"])
@pytest.mark.parametrize(("q_lora_rank", "kv_lora_rank", "rope"), [(20, 24, 8), (None, 512, 64)])
def test_prompts_and_steps_match_transformers(
    forward: str, q_lora_rank: int | None, kv_lora_rank: int, rope: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 7 tokens, then its next token together with a prompt of 5, in scattered blocks of 4.

    Keys and values are expanded for three heads, and then for the fourth.
    """
    monkeypatch.setattr(latent, "_HEADS_AT_ONCE", 3)
    theirs, angles = attention(q_lora_rank, kv_lora_rank, rope)
    call = getattr(layer_of(theirs, rope), forward)
    texts = torch.randn(8, 32), torch.randn(5, 32)
    expected = []
    with torch.no_grad():
        for text in texts:
            count = len(text)
            hidden, mask = text[None], torch.full((count, count), -torch.inf).triu(1)[None, None]
            expected.append(theirs(hidden, angles(hidden, torch.arange(count)[None]), mask)[0][0])
        cache = torch.full((6, 4, kv_lora_rank + rope), torch.nan)
        tables = torch.tensor([[4, 1], [0, 3]])
        cache[tables] = 0.0  # unused slots have no weight, but must be finite
        slots = [[16 + i if i < 4 else i for i in range(8)], [0, 1, 2, 3, 12]]
        first = call(
            torch.arange(7),
            texts[0][:7],
            kv_cache=cache,
            block_table=tables[:1],
            seq_lens=torch.tensor([7]),
            query_start_loc=torch.tensor([0, 7]),
            slot_mapping=torch.tensor(slots[0][:7]),
        )
        both = call(
            torch.tensor([7, 0, 1, 2, 3, 4]),
            torch.cat((texts[0][7:], texts[1])),
            kv_cache=cache,
            block_table=tables,
            seq_lens=torch.tensor([8, 5]),
            query_start_loc=torch.tensor([0, 1, 6]),
            slot_mapping=torch.tensor([slots[0][7], *slots[1]]),
            num_decodes=1,
        )
    ours = torch.cat((first, both))
    torch.testing.assert_close(ours, torch.cat(expected), rtol=1e-5, atol=1e-5)
    assert cache[[2, 5]].isnan().all()


@pytest.mark.parametrize("forward", ["forward_native", "forward_cuda"])
def test_tokens_without_a_slot_are_dropped(forward: str) -> None:
    theirs, _ = attention(20, 24, 8)
    cache = torch.zeros(2, 4, 32)
    with torch.no_grad():
        getattr(layer_of(theirs, 8), forward)(
            torch.arange(3),
            torch.randn(3, 32),
            kv_cache=cache,
            block_table=torch.tensor([[1]]),
            seq_lens=torch.tensor([3]),
            query_start_loc=torch.tensor([0, 3]),
            slot_mapping=torch.tensor([-1, 8, 5]),
        )
    assert cache.view(8, 32).any(1).nonzero().flatten().tolist() == [5]


def test_prompts_are_traced_as_one_graph() -> None:
    """Though GEMMs write keys next to their rotated elements, in tensors with gaps."""
    query, up, entries = torch.randn(10, 40, 24), torch.randn(40, 28, 32), torch.randn(4, 4, 40)
    texts = torch.tensor([[2, 1, 3]]), torch.tensor([10]), torch.tensor([0, 10])
    attend, call = latent.expanded_attention, (query, up, entries, *texts, 0.2, torch.ones(1))
    with torch.no_grad():
        expected = attend(*call)
        assert torch.equal(torch.compile(attend, backend="eager", fullgraph=True)(*call), expected)


def test_unsupported_or_missing_arguments_are_refused() -> None:
    theirs, _ = attention(20, 24, 8)
    modules = MLAModules(theirs.kv_a_layernorm, theirs.kv_b_proj, None, theirs.o_proj)
    with pytest.raises(ValueError, match="mla_modules: expected fused_qkv_a_proj with q_lora_rank=20"):
        MultiHeadLatentAttentionWrapper(32, HEADS, 1.0, 16, 8, 12, 20, 24, modules)
    with pytest.raises(ValueError, match="mla_modules: expected q_proj"):
        MultiHeadLatentAttentionWrapper(32, HEADS, 1.0, 16, 8, 12, None, 24, modules)
    with pytest.raises(ValueError, match="v_head_dim: expected at most 24, got 25"):
        MultiHeadLatentAttentionWrapper(32, HEADS, 1.0, 16, 8, 25, None, 24, modules)
    modules.is_sparse = True
    with pytest.raises(ValueError, match="an indexer is not supported"):
        MultiHeadLatentAttentionWrapper(32, HEADS, 1.0, 16, 8, 12, None, 24, modules)
