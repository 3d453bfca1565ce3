"""Linear layers, embedding, LM head and logits: on one rank, and on two against one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional

from pyops import nn as layers
from pyops.nn import parallel
from pyops.nn.custom_op import set_custom_ops
from pyops.nn.linear import copy_weight

Tensor = torch.Tensor


def filled(layer: Any, seed: int, *shard_ids: Any) -> dict[str, Tensor]:
    """The checkpoint tensors of the whole `layer` after loading; all shards or those with these ids."""
    generator = torch.Generator().manual_seed(seed)
    whole = {}
    sizes = getattr(layer, "output_sizes", None)
    for name, parameter in layer.named_parameters():
        columns = (layer.input_size,) if parameter.ndim == 2 else ()
        if shard_ids:
            parts = [torch.randn(size, *columns, generator=generator) for size in sizes]
            for shard_id, part in zip(shard_ids, parts, strict=True):
                parameter.weight_loader(parameter, part, shard_id)
            whole[name] = torch.cat(parts)
        else:
            rows = sum(sizes) if sizes else layer.output_size
            whole[name] = torch.randn(rows, *columns, generator=generator)
            parameter.weight_loader(parameter, whole[name])
    return whole


def of(whole: dict[str, Tensor], x: Tensor) -> Tensor:
    """In float64, cast back."""
    bias = whole.get("bias")
    return functional.linear(x.double(), whole["weight"].double(), None if bias is None else bias.double()).float()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_one_rank() -> None:
    x = torch.randn(2, 3, 8)
    for layer in (
        layers.ReplicatedLinear(8, 6),
        layers.ColumnParallelLinear(8, 6),
        layers.ColumnParallelLinear(8, 6, bias=False, gather_output=True),
        layers.MergedColumnParallelLinear(8, [6, 4]),
        layers.QKVParallelLinear(8, 4, 4, 2, bias=False),
        layers.RowParallelLinear(8, 6),
        layers.RowParallelLinear(8, 6, input_is_parallel=False),
    ):
        whole = filled(layer, 0)
        assert set(whole) == set(layer.state_dict())
        output, bias = layer(x)
        close(output, of(whole, x))
        assert bias is None
        assert not output.requires_grad
    for cls in (layers.ReplicatedLinear, layers.ColumnParallelLinear, layers.RowParallelLinear):
        layer = cls(8, 6, skip_bias_add=True, params_dtype=torch.float32)
        whole = filled(layer, 1)
        output, bias = layer(x)
        close(output + bias, of(whole, x))
        assert bias is layer.bias
        alone = cls(8, 6, return_bias=False)
        assert isinstance(alone, torch.nn.Module)
        filled(alone, 1)
        close(alone(x), of(whole, x))
        assert cls(8, 6, params_dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    layer = layers.QKVParallelLinear(8, 4, 4, 2, v_head_size=3)
    whole = filled(layer, 2, "q", "k", "v")
    assert layer.output_sizes == [16, 8, 6]
    close(layer(x)[0], of(whole, x))


def test_parameters_have_the_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.bfloat16)
    assert layers.ReplicatedLinear(4, 8).weight.dtype == torch.bfloat16
    assert layers.ReplicatedLinear(4, 8, params_dtype=torch.float16).bias.dtype == torch.float16


def test_weight_of_the_size_of_a_shard_is_not_the_whole() -> None:
    layer = layers.ReplicatedLinear(4, 2, bias=False)
    whole = torch.arange(16.0).view(4, 4)
    copy_weight(layer, layer.weight, whole, 0, 2, 4)
    assert torch.equal(layer.weight, whole[2:])
    with pytest.raises(
        ValueError, match=r"expected 4 along dimension 0 for a place of shape \(2, 4\), got shape \(2, 4\)"
    ):
        copy_weight(layer, layer.weight, whole[:2], 0, 2, 4)


def test_embedding() -> None:
    layer = layers.VocabParallelEmbedding(100, 8)
    assert layer.weight.shape == (128, 8)
    table = torch.randn(100, 8)
    layer.weight.weight_loader(layer.weight, table)
    tokens = torch.randint(100, (2, 3))
    assert torch.equal(layer(tokens), functional.embedding(tokens, table))
    assert not layer.weight[100:].any()
    # Rows of added tokens come after the padding of the original ones.
    layer = layers.VocabParallelEmbedding(1026, 4, org_num_embeddings=1010)
    assert (layer.org_vocab_size_padded, layer.num_embeddings_padded) == (1024, 1088)
    layer.weight.weight_loader(layer.weight, torch.randn(1010, 4))
    with torch.no_grad():
        layer.weight[1024:1040] = torch.arange(16.0)[:, None]
    assert torch.equal(layer(torch.tensor([1010, 1025]))[:, 0], torch.tensor([0.0, 15.0]))
    assert not layer(torch.tensor([1026, -1])).any()
    assert layer.get_sharded_to_full_mapping() is None


def test_logits() -> None:
    table, hidden = torch.randn(100, 8), torch.randn(3, 8)
    head = layers.ParallelLMHead(100, 8, bias=True)
    assert set(head.state_dict()) == {"weight", "bias"}
    head.weight.weight_loader(head.weight, table)
    bias = torch.randn(100)
    head.bias.weight_loader(head.bias, bias)
    plain = functional.linear(hidden, table, bias)
    close(layers.LogitsProcessor(100)(head, hidden), plain)
    close(layers.LogitsProcessor(100, 90)(head, hidden), plain[:, :90])
    capped = 5.0 * torch.tanh(plain.double() / 5.0) * 0.5
    close(layers.LogitsProcessor(100, scale=0.5, soft_cap=5.0)(head, hidden).double(), capped)
    processor = layers.LogitsProcessor(100, scale=2.0, logits_as_input=True)
    assert torch.equal(processor(None, plain), plain * 2)  # type: ignore[arg-type]
    other = torch.randn(128)
    close(layers.LogitsProcessor(100)(head, hidden, other), functional.linear(hidden, table) + other[:100])
    with pytest.raises(RuntimeError, match="ParallelLMHead: is not called"):
        head(hidden)
    embedding = layers.VocabParallelEmbedding(100, 8)
    assert layers.ParallelLMHead(100, 8).tie_weights(embedding).weight is embedding.weight
    with pytest.raises(ValueError, match=r"ParallelLMHead: embed_tokens: expected a weight of shape \(128, 8\)"):
        layers.ParallelLMHead(100, 8).tie_weights(layers.VocabParallelEmbedding(200, 8))
    added = layers.ParallelLMHead(70, 4, org_num_embeddings=60)
    with torch.no_grad():
        added.weight.copy_(torch.arange(128.0)[:, None].expand(128, 4))
    logits = layers.LogitsProcessor(70)(added, torch.tensor([[1.0, 0, 0, 0]]))
    assert logits[0].tolist() == [*range(60), *range(64, 74)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers.ReplicatedLinear(8, 8, quant_config="fp8"), "ReplicatedLinear: quant_config: expected None"),
        (
            lambda: layers.RowParallelLinear(8, 8, reduce_results=False),
            "RowParallelLinear: bias: cannot be added where reduce_results is False",
        ),
        (
            lambda: _load(layers.ColumnParallelLinear(8, 8), torch.zeros(9, 8)),
            "ColumnParallelLinear: weight_loader: expected 8 along dimension 0",
        ),
        (
            lambda: _load(layers.ReplicatedLinear(8, 8), torch.zeros(8, 9)),
            "ReplicatedLinear: weight_loader: expected all",
        ),
        (
            lambda: _load(layers.RowParallelLinear(8, 4), torch.zeros(5, 8)),
            "RowParallelLinear: weight_loader: expected 8",
        ),
        (
            lambda: _load(layers.MergedColumnParallelLinear(8, [2, 2]), torch.zeros(2, 8), 2),
            r"MergedColumnParallelLinear: loaded_shard_id: expected one of \[0, 1\], got 2",
        ),
        (
            lambda: _load(layers.QKVParallelLinear(8, 2, 2), torch.zeros(8, 8)),
            "QKVParallelLinear: weight_loader: expected 12 rows, got 8",
        ),
        (
            lambda: _load(layers.VocabParallelEmbedding(10, 2), torch.zeros(11, 2)),
            r"VocabParallelEmbedding: weight_loader: expected shape \(10, 2\)",
        ),
        (
            lambda: layers.VocabParallelEmbedding(10, 2, org_num_embeddings=11),
            "VocabParallelEmbedding: org_num_embeddings: expected at most num_embeddings=10",
        ),
    ],
)
def test_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def _load(layer: Any, *loaded: Any) -> None:
    layer.weight.weight_loader(layer.weight, *loaded)


def _whole_block(x: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """Every layer, as on any number of ranks: the parts that are equal on all of them."""
    found: dict[str, Tensor] = {}
    gathered = layers.ColumnParallelLinear(8, 6, gather_output=True)
    filled(gathered, 0)
    found["gathered"] = gathered(x)[0]
    merged = layers.MergedColumnParallelLinear(8, [12, 12])
    filled(merged, 1, 0, 1)
    down = layers.RowParallelLinear(12, 8)
    filled(down, 2)
    found["mlp"] = down(layers.SiluAndMul()(merged(x)[0]))[0]
    together = layers.MergedColumnParallelLinear(8, [12, 8], gather_output=True)
    column = torch.randn(20, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        size, rank = parallel.get_tensor_model_parallel_world_size(), parallel.get_tensor_model_parallel_rank()
        parts = [part.chunk(size)[rank] for part in column.split([12, 8])]
        together.weight.copy_(torch.cat(parts)[:, None].expand_as(together.weight))
        together.bias.zero_()
    found["several gathered"] = together(x)[0]
    replicated = layers.ReplicatedLinear(8, 6)
    filled(replicated, 4)
    found["replicated"] = replicated(x)[0]
    for kv_heads in (4, 1):
        qkv = layers.QKVParallelLinear(8, 4, 4, kv_heads)
        filled(qkv, 5)
        out = layers.RowParallelLinear(16, 8, bias=False)
        filled(out, 6)
        heads = [qkv.num_heads * 4, qkv.num_kv_heads * 4, qkv.num_kv_heads * 4]
        query, key, value = (part.unflatten(-1, (-1, 4)).transpose(-2, -3) for part in qkv(x)[0].split(heads, -1))
        attended = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        found[f"attention, {kv_heads}"] = out(attended.transpose(-2, -3).flatten(-2))[0]
    whole = layers.RowParallelLinear(8, 6, input_is_parallel=False, skip_bias_add=True)
    filled(whole, 7)
    found["row of the whole"] = torch.stack(torch.broadcast_tensors(*whole(x)))
    local = layers.ColumnParallelLinear(8, 6, disable_tp=True)
    filled(local, 8)
    found["not divided"] = local(x)[0]
    embedding = layers.VocabParallelEmbedding(150, 8, org_num_embeddings=140)
    head = layers.ParallelLMHead(150, 8, org_num_embeddings=140, bias=True)
    table = torch.randn(140, 8, generator=torch.Generator().manual_seed(9))
    added = torch.randn(10, 8, generator=torch.Generator().manual_seed(10))
    own = embedding.shard_indices
    for layer in (embedding, head):
        layer.weight.weight_loader(layer.weight, table)
        here = added[own.added_vocab_start_index - 140 : own.added_vocab_end_index - 140]
        with torch.no_grad():
            layer.weight[own.num_org_elements_padded :][: len(here)] = here
    head.bias.weight_loader(head.bias, table[:, 0])
    found["embedding"] = embedding(tokens)
    found["logits"] = layers.LogitsProcessor(150)(head, x)
    found["original logits"] = layers.LogitsProcessor(150, 140)(head, x)
    conv = layers.ShortConv(ConvConfig, 8, 0)
    filled_conv = torch.Generator().manual_seed(11)
    conv.conv.weight.weight_loader(conv.conv.weight, torch.randn(8, 1, 3, generator=filled_conv))
    conv.conv.bias.weight_loader(conv.conv.bias, torch.randn(8, generator=filled_conv))
    filled(conv.in_proj, 12)
    filled(conv.out_proj, 13)
    found["short convolution"] = conv(x.flatten(0, 1))
    for groups in (1, 4):
        rank, size = parallel.get_tensor_model_parallel_rank(), parallel.get_tensor_model_parallel_world_size()
        norm = layers.Mixer2RMSNormGated(8, groups)
        parts = [x.chunk(size, -1)[rank], x.flip(-1).chunk(size, -1)[rank]]
        found[f"norm, {groups}"] = parallel.tensor_model_parallel_all_gather(norm(*parts))
        mamba2 = _filled_mixer(lambda n_groups=groups: layers.MambaMixer2(8, 3, 3, 16, True, False, n_groups, 4, 4))
        found[f"Mamba-2, {groups}"] = mamba2(x.flatten(0, 1))
    tp_norm = layers.MiniMaxText01RMSNormTP(8)
    tp_norm.weight.weight_loader(tp_norm.weight, torch.linspace(0.5, 2.0, 8))
    found["norm of divided rows"] = parallel.tensor_model_parallel_all_gather(tp_norm(parts[0]))
    both = tp_norm.forward_qk(tp_norm, tp_norm, *parts)
    found["norms of divided rows"] = parallel.tensor_model_parallel_all_gather(torch.stack(both))
    found["Mamba"] = _filled_mixer(lambda: layers.MambaMixer(8, 3, 3, 16, 2, True, True, True))(x.flatten(0, 1))
    return found


def _filled_mixer(make: Callable[[], Any]) -> Any:
    """A mixer with parameters that are shards of the same random weights on every rank."""
    group = parallel._group
    layers.set_tensor_parallel_group(None)
    shapes = [parameter.shape for parameter in make().parameters()]
    layers.set_tensor_parallel_group(group)
    mixer, generator = make(), torch.Generator().manual_seed(15)
    for parameter, shape in zip(mixer.parameters(), shapes, strict=True):
        weight = torch.randn(shape, generator=generator)
        loader = getattr(parameter, "weight_loader", None)
        loader(parameter, weight) if loader else parameter.copy_(weight)
    return mixer


class ConvConfig:
    conv_L_cache = 3
    conv_bias = True


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(14)
    tokens = torch.tensor([[0, 63, 64], [139, 140, 149]])
    return torch.randn(2, 3, 8, generator=generator), tokens


def _rank(rank: int, size: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    layers.set_tensor_parallel_group(dist.group.WORLD)
    assert parallel.get_tensor_model_parallel_rank() == rank
    with torch.no_grad():
        found = _whole_block(*_inputs())
        # 3 groups on 2 ranks: each has one and a half.
        x = torch.arange(12.0).sin().expand(2, 12)
        norm = layers.Mixer2RMSNormGated(12, 3)
        half = x.chunk(size, -1)[rank]
        found["norm, 3"] = parallel.tensor_model_parallel_all_gather(norm(half, half))
        with set_custom_ops("all", platform="cuda"):
            gathered = layers.VocabParallelEmbedding(128, 4).get_sharded_to_full_mapping()
    assert gathered == list(range(128))
    with pytest.raises(ValueError, match="ColumnParallelLinear: output_size: expected a multiple of 2, got 5"):
        layers.ColumnParallelLinear(8, 5)
    torch.save(found, f"{results}.{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_match_one(tmp_path: Path) -> None:
    with torch.no_grad():
        expected = _whole_block(*_inputs())
        x = torch.arange(12.0).sin().expand(2, 12)
        expected["norm, 3"] = layers.Mixer2RMSNormGated(12, 3)(x, x)
    mp.spawn(_rank, (2, str(tmp_path / "store"), str(tmp_path / "result")), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"result.{rank}")
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(
                value, expected[name], rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.parametrize("count", [3, 17])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_gate_linear(out_dtype: torch.dtype | None, count: int) -> None:
    """Logits in their own dtype; at small M, float32 logits without a rounding on the way."""
    layer = layers.GateLinear(64, 8, out_dtype=out_dtype, params_dtype=torch.bfloat16)
    _load(layer, torch.randn(8, 64))
    x = torch.randn(count, 64, dtype=torch.bfloat16)
    logits, bias = layer(x)
    assert bias is None
    assert logits.dtype == (out_dtype or torch.bfloat16)
    rtol = 1e-5 if out_dtype is not None and count <= 16 else 2.0**-8
    torch.testing.assert_close(logits.double(), x.double() @ layer.weight.double().T, rtol=rtol, atol=1e-4)


def test_float32_gate() -> None:
    layer = layers.GateLinear(64, 8, bias=True, force_fp32_compute=True)
    _load(layer, torch.randn(8, 64))
    layer.bias.data.fill_(1)
    layer.set_out_dtype(torch.float16)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(layer(x)[0], (x.float() @ layer.weight.T + 1).half())
    with pytest.raises(ValueError, match=r"GateLinear: out_dtype: is torch.float16 already, got torch.float32"):
        layer.set_out_dtype(torch.float32)
