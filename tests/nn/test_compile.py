"""torch.compile of a model of layers: one graph for any number of tokens, with the results of eager calls."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention

from pyops import nn as layers
from pyops.nn.custom_op import set_custom_ops
from pyops.testing import same_bits

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 64, 4, 2, 16, 96


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = layers.RMSNorm(HIDDEN), layers.RMSNorm(HIDDEN)
        self.qkv_proj = layers.QKVParallelLinear(HIDDEN, HEAD_SIZE, HEADS, KV_HEADS)
        self.o_proj = layers.RowParallelLinear(HEADS * HEAD_SIZE, HIDDEN, bias=False)
        self.q_norm, self.k_norm = layers.RMSNorm(HEAD_SIZE), layers.RMSNorm(HEAD_SIZE)
        self.rotary_emb = layers.RotaryEmbedding(HEAD_SIZE, HEAD_SIZE, 64, 1e4, True, torch.get_default_dtype())
        self.gate_up_proj = layers.MergedColumnParallelLinear(HIDDEN, [96, 96], bias=False)
        self.act_fn = layers.SiluAndMul()
        self.down_proj = layers.RowParallelLinear(96, HIDDEN, bias=False)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        sizes = [HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE]
        query, key, value = self.qkv_proj(hidden)[0].split(sizes, -1)
        query = self.q_norm(query.unflatten(-1, (HEADS, HEAD_SIZE)))
        key = self.k_norm(key.unflatten(-1, (KV_HEADS, HEAD_SIZE)))
        query, key = self.rotary_emb(positions, query, key)
        heads = (x.transpose(-2, -3) for x in (query, key, value.unflatten(-1, (KV_HEADS, HEAD_SIZE))))
        out = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        hidden = self.o_proj(out.transpose(-2, -3).flatten(-2))[0]
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.down_proj(self.act_fn(self.gate_up_proj(hidden)[0]))[0], residual


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = layers.VocabParallelEmbedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = layers.RMSNorm(HIDDEN)
        self.lm_head = layers.ParallelLMHead(VOCABULARY, HIDDEN)
        self.logits_processor = layers.LogitsProcessor(VOCABULARY, soft_cap=20.0)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed_tokens(tokens), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return self.logits_processor(self.lm_head, hidden)


def _inputs(num_tokens: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(VOCABULARY, (num_tokens,), device=device), torch.arange(num_tokens, device=device)


@pytest.mark.parametrize(("platform", "how"), [("cpu", "dynamic"), ("cuda", "mark_dynamic")])
@pytest.mark.slow
def test_one_graph_for_all_batches(platform: Any, how: str) -> None:
    """By the native methods, and by the ops, which run their references here."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with set_custom_ops("all", platform=platform):
        model = Model()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True if how == "dynamic" else None, backend=counter)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for num_tokens in (5, 7, 2, 31):
            tokens, positions = _inputs(num_tokens)
            if how == "mark_dynamic":
                for x in (tokens, positions):
                    torch._dynamo.mark_dynamic(x, 0)
            assert same_bits(compiled(tokens, positions), model(tokens, positions))
    assert not torch._dynamo.utils.counters["graph_break"]
    called = {str(node.target) for node in counter.graphs[0].graph.nodes if "pyops" in str(node.target)}
    ops = {"rms_norm", "fused_add_rms_norm", "rotary_embedding", "silu_and_mul"}
    assert called == ({f"pyops.{op}" for op in ops} if platform == "cuda" else set())


def test_native_methods_and_ops_agree() -> None:
    models = []
    for platform in ("cpu", "cuda"):
        torch.manual_seed(0)
        with set_custom_ops("all", platform=platform):
            models.append(Model())
    inputs = _inputs(9)
    with torch.no_grad():
        assert same_bits(*(model(*inputs) for model in models))


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_inductor_fuses_disabled_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated MLP after a norm; a model that inductor compiles disables them by default."""
    # For one kernel, precompiling torch's headers and trying vector ISAs take longer than compiling.
    monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", False)
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", False)
    torch.manual_seed(0)
    torch._dynamo.reset()
    with set_custom_ops(mode=3, backend="inductor") as config:
        norm, act = layers.RMSNorm(32), layers.SiluAndMul()
    assert config.disabled_custom_ops == {"rms_norm": 1, "silu_and_mul": 1}

    def mlp(x: torch.Tensor, residual: torch.Tensor) -> Any:
        y, residual = norm(x, residual)
        return act(y), residual

    compiled = torch.compile(mlp, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for num_tokens in (3, 6):
            x, residual = torch.randn(2, num_tokens, 32)
            for result, expected in zip(compiled(x, residual), mlp(x, residual), strict=True):
                torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "layer",
    [
        layers.GeluAndMul("tanh"),
        layers.GeluAndMulSparse(0.9),
        layers.FatreluAndMul(0.3),
        layers.SwigluOAIAndMul(),
        layers.SwigluStepAndMul(),
        layers.MulAndSilu(),
        layers.GELU(),
        layers.NewGELU(),
        layers.FastGELU(),
        layers.QuickGELU(),
        layers.ReLUSquaredActivation(),
        layers.XIELU(),
        layers.GemmaRMSNorm(16),
        layers.RMSNormGated(16),
        layers.MiniMaxText01RMSNormTP(16),
        layers.QuantFP8(False, (1, -1)),
        layers.QuantFP8(False, (1, 8)),
        layers.GroupedTopk(2, True, 4, 2),
        layers.Conv2dLayer(2, 4, 2, 2),
        layers.DualChunkRotaryEmbedding(8, 8, 64, 1e4, True, torch.float32, 8, 2),
        layers.MRotaryEmbedding(8, 8, 64, 1e4, True, torch.float32, [2, 1, 1]),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("method", ["forward_native", "forward_cuda"])
def test_every_layer_is_one_graph(layer: Any, method: str) -> None:
    torch._dynamo.reset()

    def call(*args: torch.Tensor) -> Any:
        return getattr(layer, method)(*args)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for num_tokens in (4, 6):
            x = torch.rand(num_tokens, 16)
            args: tuple[torch.Tensor, ...] = (x,)
            if isinstance(layer, layers.GroupedTopk):
                args = x, x
            elif isinstance(layer, layers.Conv2dLayer):
                layer.weight.fill_(0.5), layer.bias.fill_(1.0)
                args = (torch.rand(num_tokens, 2, 8, 10),)
            elif isinstance(layer, layers.MRotaryEmbedding):
                args = torch.randint(64, (3, num_tokens)), x, x.clone()
            elif isinstance(layer, layers.DualChunkRotaryEmbedding):
                args = torch.randint(64, (num_tokens,)), x, x.clone()
            eager = getattr(layer, method)(*(arg.clone() for arg in args))
            results = compiled(*(arg.clone() for arg in args))
            for result, expected in zip(*([r] if torch.is_tensor(r) else r for r in (results, eager)), strict=True):
                if result.dtype == torch.float8_e4m3fn:
                    result, expected = result.view(torch.uint8), expected.view(torch.uint8)
                assert same_bits(result, expected)


@pytest.mark.slow
def test_segments_and_short_convolutions_are_one_graph() -> None:
    torch._dynamo.reset()
    attention = layers.MMEncoderAttention(2, 8)
    conv = layers.ShortConv(SimpleNamespace(conv_L_cache=3, conv_bias=True), 16, 0)
    for parameter in conv.parameters():
        nn.init.normal_(parameter)

    def call(x: torch.Tensor, starts: torch.Tensor, state: torch.Tensor, slots: torch.Tensor) -> Any:
        q, k, v = x[None].expand(3, 1, -1, -1)
        initial = slots > 0
        results = attention.forward_cuda(q, k, v, starts, 6), conv(x, state, starts, slots, initial)
        return *results, conv.forward_cuda(x, state, starts, slots, initial)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([3, 4, 6], [2, 5], [6, 1, 1, 4]):
            starts = torch.tensor([0, *lengths]).cumsum(0).int()
            states = torch.randn(8, 16, 2)
            slots, x = torch.randperm(7)[: len(lengths)] - 1, torch.randn(sum(lengths), 16)
            eager, traced = states.clone(), states.clone()
            expected = call(x, starts, eager, slots)
            for result, other in zip(compiled(x, starts, traced, slots), expected, strict=True):
                assert same_bits(result, other)
            assert same_bits(eager, traced)


@pytest.mark.slow
@pytest.mark.parametrize("decodes", [False, True])
def test_mixers_are_one_graph(decodes: bool) -> None:
    torch._dynamo.reset()
    mixers = layers.MambaMixer(8, 4, 3, 16, 2, True, False, True), layers.MambaMixer2(8, 4, 3, 16, True, False, 1, 4, 4)
    for mixer in mixers:
        for name, parameter in mixer.named_parameters():
            parameter.requires_grad_(False)
            nn.init.uniform_(parameter, *((-1.0, -0.5) if name == "A" else (-0.5, 0.5)))

    def call(x: torch.Tensor, starts: torch.Tensor, conv: Any, ssm: Any, slots: torch.Tensor) -> list[torch.Tensor]:
        initial, num_decodes = slots > 0, 1 if decodes else 0
        return [
            mixer.forward_cuda(x, conv[i], ssm[i], starts, slots, initial, num_decodes)
            for i, mixer in enumerate(mixers)
        ]

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        # The first batch has numbers that equal no size of a weight, which torch would identify, and more than one
        # prompt.
        for lengths in ([1, 4, 6, 3, 5, 2], [1, 5, 2], [1, 3, 2, 4]):
            starts = torch.tensor([0, *lengths]).cumsum(0).int()
            states = [torch.randn(8, 16, 2), torch.randn(8, 24, 2)], [torch.randn(8, 16, 4), torch.randn(8, 4, 4, 4)]
            slots, x = torch.randperm(7)[: len(lengths)].int(), torch.randn(sum(lengths), 8)
            eager, traced = ([[state.clone() for state in kind] for kind in states] for _ in range(2))
            expected = call(x, starts, *eager, slots)
            for result, other in zip(compiled(x, starts, *traced, slots), expected, strict=True):
                assert same_bits(result, other)
            for kind, others in zip(traced, eager, strict=True):
                assert all(same_bits(state, other) for state, other in zip(kind, others, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="inductor needs a C compiler")
def test_cuda_graphs() -> None:
    """`mode="reduce-overhead"` captures the kernels; replays equal eager calls."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.device("cuda"), set_custom_ops("all"):
        model = Model().to(torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            inputs = _inputs(16, "cuda")
            expected = model(*inputs)  # loads the kernels
            torch.compiler.cudagraph_mark_step_begin()
            result = compiled(*inputs).clone()
            torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_graph_of_segments_and_short_convolutions() -> None:
    """Attention in segments and the short convolution read no lengths on the host."""
    torch.manual_seed(0)
    with torch.device("cuda"), set_custom_ops("all"):
        attention = layers.MMEncoderAttention(4, 64)
        q, k, v = torch.randn(3, 1, 9, 4, 64, dtype=torch.bfloat16)
        starts = torch.tensor([0, 2, 5, 9], dtype=torch.int32)
        conv = layers.ShortConv(SimpleNamespace(conv_L_cache=3, conv_bias=False), 64, 0)
        for parameter in conv.parameters():
            nn.init.normal_(parameter, 0.0, 0.1)
        x, state, slots = torch.randn(9, 64), torch.zeros(4, 64, 2), torch.tensor([2, 0, -1])
        initial = torch.tensor([True, False, True])

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return attention(q, k, v, starts), conv(x, state, starts, slots, initial)

    with torch.no_grad():
        expected_attention = attention.forward_native(q, k, v, starts)
        call()
        state.zero_()
        expected_conv = call()[1]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
        state.zero_()
        graph.replay()
        torch.testing.assert_close(results[0], expected_attention, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(results[1], expected_conv)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels_and_native_methods_agree_on_the_gpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kernels_and_natives = []
    for platform in ("cuda", "cpu"):
        torch.manual_seed(0)
        with torch.device("cuda"), set_custom_ops("all", platform=platform):
            kernels_and_natives.append(Model().to(dtype))
    inputs = _inputs(13, "cuda")
    with torch.no_grad():
        kernels, natives = (model(*inputs) for model in kernels_and_natives)
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    torch.testing.assert_close(kernels, natives, rtol=tolerance, atol=tolerance)
