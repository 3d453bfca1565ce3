"""vLLM's attention layer on this library's backend, against torch's attention, and vLLM's choice among backends."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.vllm_attention import BLOCK_SIZE, attention, block_tables, common_metadata, cuda_platform

NUM_BLOCKS, TABLE_WIDTH = 40, 64
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(scope="module", autouse=True)
def platform() -> Iterator[Any]:

    with cuda_platform() as device:
        yield device


@pytest.fixture
def vllm_config() -> Iterator[Any]:
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def make_layer(
    heads: tuple[int, int],
    head_size: int,
    dtype: torch.dtype,
    cache: str,
    canonical: tuple[int, ...] | None = None,
    **more: Any,
) -> Any:
    """vLLM's layer with an empty cache: every slot holds NaN, or the fp8 maximum.

    `canonical`: the order in memory of a cache as vLLM 0.33 has it, [blocks, heads, slots, keys and values of a slot].
    """
    from vllm.config import CacheConfig
    from vllm.model_executor.layers.attention import Attention

    from pyops.integrations.vllm.parts._paged_attention import PagedBackend

    cache_config = CacheConfig(block_size=BLOCK_SIZE, cache_dtype=cache)
    layer = Attention(
        heads[0],
        head_size,
        head_size**-0.5,
        heads[1],
        cache_config=cache_config,
        attn_backend=PagedBackend,
        **{"prefix": "layers.0.attn"} | more,
    )
    layer.process_weights_after_loading(dtype)
    if canonical is None:
        shape = PagedBackend.get_kv_cache_shape(NUM_BLOCKS, BLOCK_SIZE, heads[1], head_size, cache)
        order = PagedBackend.get_kv_cache_stride_order()
    else:
        shape, order = (NUM_BLOCKS, heads[1], BLOCK_SIZE, 2 * head_size), canonical
    storage = torch.uint8 if cache.startswith("fp8") else dtype
    value = 0x7E if storage is torch.uint8 else torch.nan
    empty = torch.full([shape[dim] for dim in order], value, dtype=storage)
    layer.kv_cache = empty.permute([order.index(dim) for dim in range(len(order))])
    return layer


def run(layer: Any, config: Any, common: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    """[rows, num_heads, head_size] of one step of the layer, with metadata by its backend's builder."""
    from vllm.forward_context import set_forward_context
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    heads, size = layer.num_kv_heads, layer.head_size
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=heads, head_size=size, dtype=layer.kv_cache.dtype)
    builder = layer.attn_backend.get_builder_cls()(spec, [layer.layer_name], config, torch.device("cpu"))
    metadata = {layer.layer_name: builder.build(0, common)}
    with set_forward_context(metadata, config, slot_mapping={layer.layer_name: common.slot_mapping}):
        return layer(query.flatten(1), key.flatten(1), value.flatten(1)).view_as(query)


def assert_is_attention(
    config: Any,
    steps: list[list[int]],
    *,
    heads: tuple[int, int] = (6, 2),
    head_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    cache: str = "auto",
    scales: tuple[float, float] = (1.0, 1.0),
    rows: int = 0,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    """Each step gives each sequence these numbers of new tokens; every token attends to those of earlier steps."""
    torch.manual_seed(0)
    layer = make_layer(heads, head_size, dtype, cache, **more)
    layer._k_scale.fill_(scales[0])
    layer._v_scale.fill_(scales[1])
    total = [sum(counts) for counts in zip(*steps, strict=True)]
    tables = block_tables(total, TABLE_WIDTH, NUM_BLOCKS)
    old = [torch.empty(2, 0, heads[1], head_size, dtype=dtype) for _ in total]
    for counts in steps:
        lengths = [kv.shape[1] + count for kv, count in zip(old, counts, strict=True)]
        common = common_metadata(counts, lengths, tables, rows=rows)
        tokens = max(rows, sum(counts))
        # As a projection writes them: slices of one row each.
        q, k, v = torch.randn(tokens, heads[0] + 2 * heads[1], head_size).to(dtype).split((heads[0], *heads[1:] * 2), 1)
        out = run(layer, config, common, q, k, v)
        q, k, v, out = (x.split([*counts, tokens - sum(counts)])[: len(counts)] for x in (q, k, v, out))
        for s, (own_q, own_k, own_v, result) in enumerate(zip(q, k, v, out, strict=True)):
            old[s] = torch.cat((old[s], torch.stack((own_k, own_v))), 1)
            keys, values = (_stored(x, scale, cache) for x, scale in zip(old[s], scales, strict=True))
            right = attention(own_q, keys, values, head_size**-0.5, **(options or {}))
            torch.testing.assert_close(result.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def _stored(x: torch.Tensor, scale: float, cache: str) -> torch.Tensor:
    """x after a round trip through a cache of this type."""
    if not cache.startswith("fp8"):
        return x
    codes = torch.float8_e5m2 if cache == "fp8_e5m2" else torch.float8_e4m3fn
    return (x.float() / scale).to(codes).double() * scale


# Whole prompts, then a chunk of a prompt with single tokens, then single tokens alone.
STEPS = [[37, 5, 1, 18], [1, 40, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 80, 256])
def test_layer_matches_torch_attention(vllm_config: Any, dtype: torch.dtype, head_size: int) -> None:
    assert_is_attention(vllm_config, STEPS, head_size=head_size, dtype=dtype)


@pytest.mark.parametrize("heads", [(4, 4), (16, 1)])
def test_numbers_of_heads(vllm_config: Any, heads: tuple[int, int]) -> None:
    assert_is_attention(vllm_config, STEPS[1:3], heads=heads)


@pytest.mark.parametrize(
    ("cache", "scales"), [("fp8", (0.02, 0.03)), ("fp8_e4m3", (0.25, 1.0)), ("fp8_e5m2", (1.0, 1.0))]
)
def test_fp8_cache(vllm_config: Any, cache: str, scales: tuple[float, float]) -> None:
    assert_is_attention(vllm_config, STEPS, cache=cache, scales=scales)


def test_window(vllm_config: Any) -> None:
    """A token attends to itself and the 8 before it."""
    assert_is_attention(vllm_config, STEPS, options={"window": 9}, per_layer_sliding_window=9)


def test_soft_cap_and_alibi(vllm_config: Any) -> None:
    slopes = [2.0**-h for h in range(1, 7)]
    options = {"cap": 2.5, "slopes": torch.tensor(slopes)}
    assert_is_attention(vllm_config, STEPS[:3], options=options, logits_soft_cap=2.5, alibi_slopes=slopes)


def test_sinks(vllm_config: Any) -> None:
    """Loaded as bfloat16, as in gpt-oss."""
    sinks = torch.linspace(-2, 3, 6).bfloat16()
    options = {"sinks": sinks, "window": 20}
    assert_is_attention(vllm_config, STEPS, options=options, per_layer_sliding_window=20, sinks=sinks)


@pytest.mark.parametrize("steps", [STEPS[:1], STEPS[2:]], ids=["prompts", "decode"])
def test_padding_rows_of_a_graph(vllm_config: Any, steps: list[list[int]]) -> None:
    assert_is_attention(vllm_config, steps, rows=64)


def test_sequences_without_new_tokens(vllm_config: Any) -> None:
    """The others have one each, so that a sequence's row differs from its index."""
    assert_is_attention(vllm_config, [[3, 20, 9], [0, 1, 1], [1, 1, 0]])


def test_layers_that_share_a_cache(vllm_config: Any) -> None:
    """The second layer attends to the keys and values of the first, and ignores its own."""
    heads, size = (6, 2), 64
    writer = make_layer(heads, size, torch.bfloat16, "auto")
    shares = {"prefix": "layers.1.attn", "kv_sharing_target_layer_name": writer.layer_name}
    reader = make_layer(heads, size, torch.bfloat16, "auto", **shares)
    reader.kv_cache = writer.kv_cache
    common = common_metadata([20], [20], block_tables([20], TABLE_WIDTH, NUM_BLOCKS))
    q, k, v = torch.randn(20, 10, size).bfloat16().split((6, 2, 2), 1)
    outs = run(writer, vllm_config, common, q, k, v), run(reader, vllm_config, common, q, -k, 2 * v)
    assert torch.equal(*outs)
    torch.testing.assert_close(outs[0].double(), attention(q, k, v, size**-0.5), rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize("layers", [False, True])
def test_memory_layout_of_a_cache(layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come first, with all layers of a block together; then keys before values, and slots or heads."""
    from pyops.integrations.vllm.parts import _paged_attention

    shape = _paged_attention.PagedBackend.get_kv_cache_shape(7, 16, 2, 64)
    assert shape == (7, 2, 16, 2, 64)
    names = ["layer"] * layers + ["block", "part", "slot", "head", "element"]
    for layout, inner in (("NHD", ["slot", "head"]), ("HND", ["head", "slot"])):
        monkeypatch.setattr(_paged_attention, "get_kv_cache_layout", lambda found=layout: found)
        order = _paged_attention.PagedBackend.get_kv_cache_stride_order(layers)
        assert [names[dim] for dim in order] == ["block", *["layer"] * layers, "part", *inner, "element"]


def test_cache_group_uses_its_own_table(vllm_config: Any) -> None:
    """vLLM makes metadata once for groups that differ in their tables and slots alone."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from pyops.integrations.vllm.parts._paged_attention import PagedMetadataBuilder

    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    builder = PagedMetadataBuilder(spec, ["layer"], vllm_config, torch.device("cpu"))
    one, other = (common_metadata([1, 1], [40, 9], block_tables([40, 9], 8, NUM_BLOCKS)) for _ in range(2))
    first = builder.build(0, one)
    second = builder.update_block_table(first, other.block_table_tensor, other.slot_mapping)
    assert torch.equal(first.block_table, one.block_table_tensor[:, :4])
    assert torch.equal(second.block_table, other.block_table_tensor[:, :4])
    assert second.slot_mapping is other.slot_mapping
    assert second.seq_lens is first.seq_lens


def test_scales_that_are_loaded_again(vllm_config: Any) -> None:
    """In other tensors than those of the first steps."""
    layer = make_layer((6, 2), 64, torch.bfloat16, "fp8")
    common = common_metadata([8], [8], block_tables([8], 8, NUM_BLOCKS))
    for scale in (1.0, 0.02):
        layer._k_scale = layer._v_scale = torch.tensor(scale)
        layer.impl.process_weights_after_loading(torch.bfloat16)
        q, k, v = torch.randn(8, 10, 64).bfloat16().split((6, 2, 2), 1)
        out = run(layer, vllm_config, common, q, k, v)
        right = attention(q, _stored(k, scale, "fp8"), _stored(v, scale, "fp8"), layer.impl.scale)
        torch.testing.assert_close(out.double(), right, rtol=1.6e-2, atol=1.6e-2)


def test_features_of_other_backends_are_refused(vllm_config: Any) -> None:
    from vllm.v1.attention.backend import AttentionType

    layer = make_layer((6, 2), 64, torch.bfloat16, "auto")
    common = common_metadata([3], [3], block_tables([3], 8, NUM_BLOCKS))
    q, k, v = torch.randn(3, 10, 64).bfloat16().split((6, 2, 2), 1)
    common.causal = False
    with pytest.raises(NotImplementedError, match="causal"):
        run(layer, vllm_config, common, q, k, v)
    with pytest.raises(NotImplementedError, match="expected attention of a decoder"):
        layer.attn_backend.get_impl_cls()(6, 64, 1.0, attn_type=AttentionType.ENCODER_ONLY)


def test_heads_before_slots(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyops.integrations.vllm.parts import _paged_attention

    monkeypatch.setattr(_paged_attention, "get_kv_cache_layout", lambda: "HND")
    assert_is_attention(vllm_config, STEPS)


@pytest.mark.parametrize("canonical", [(0, 1, 2, 3), (0, 2, 1, 3)])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_caches_of_0_33(vllm_config: Any, canonical: tuple[int, ...], cache: str) -> None:
    """A slot holds its keys and its values next to each other, and heads or slots come first."""
    assert_is_attention(
        vllm_config, STEPS, canonical=canonical, cache=cache, scales=(0.5, 0.5) if cache == "fp8" else (1.0, 1.0)
    )


@pytest.fixture
def installed(platform: Any, vllm_config: Any) -> Iterator[None]:
    from pyops.integrations.vllm.parts import attention as part

    assert "CUSTOM" in part.install()
    assert part.install() == part.install()
    yield
    part.uninstall()


def choice(platform: Any, **config: Any) -> str:
    """The class of the backend that vLLM chooses."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None} | config
    found = platform.get_attn_backend_cls(config.pop("backend", None), AttentionSelectorConfig(**config), num_heads=16)
    return str(found.rpartition(".")[2])


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"dtype": torch.float16, "kv_cache_dtype": "float16"},
        {"head_size": 256, "kv_cache_dtype": "fp8"},
        {"head_size": 64, "has_sink": True, "block_size": 64},
        {"kv_cache_dtype": "fp8_e5m2", "use_per_head_quant_scales": True},
    ],
    ids=str,
)
def test_backend_is_chosen(installed: None, platform: Any, config: dict[str, Any]) -> None:
    assert choice(platform, **config) == "PagedBackend"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"head_size": 72}, "head_size not supported"),
        ({"head_size": 512}, "head_size not supported"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 beside queries of torch.bfloat16 not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
    ],
    ids=str,
)
def test_backend_is_not_chosen(installed: None, platform: Any, config: dict[str, Any], reason: str) -> None:
    """The next backend of vLLM that works without compiled libraries is Triton's."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    assert choice(platform, **config) == "TritonAttentionBackend"
    config = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None} | config
    _, refused = platform.get_valid_backends(DeviceCapability(9, 0), AttentionSelectorConfig(**config))
    assert {backend.name: reasons for backend, (_, reasons) in refused.items()}["CUSTOM"] == [reason]


def test_old_devices_and_context_parallelism_are_refused(installed: None, vllm_config: Any) -> None:
    with cuda_platform((7, 5)) as old:
        assert choice(old, dtype=torch.float16) == "TritonAttentionBackend"
    with cuda_platform() as device:
        vllm_config.parallel_config.decode_context_parallel_size = 2
        assert choice(device) == "TritonAttentionBackend"


def test_model_finds_vllms_backends_by_class(installed: None, platform: Any, vllm_config: Any) -> None:
    for name, backend in (
        ("LlamaForCausalLM", "PagedBackend"),
        ("VoxtralRealtimeGeneration", "TritonAttentionBackend"),
    ):
        vllm_config.model_config = SimpleNamespace(architectures=[name])
        assert choice(platform) == backend


def test_explicit_backend_is_taken(installed: None, platform: Any) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert choice(platform, backend=AttentionBackendEnum.TRITON_ATTN) == "TritonAttentionBackend"
    assert choice(platform, backend=AttentionBackendEnum.CUSTOM) == "PagedBackend"


def test_uninstall_restores_everything(platform: Any, vllm_config: Any) -> None:
    """vLLM's cached choices are dropped, both times."""
    from vllm.platforms import cuda
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import get_attn_backend

    from pyops.integrations.vllm.parts import attention as part

    own, names = cuda._get_backend_priorities, []
    for step in (str, part.install, part.uninstall):
        step()
        names.append(get_attn_backend(128, torch.bfloat16, "auto").get_name())
    assert names == ["TRITON_ATTN", "CUSTOM", "TRITON_ATTN"]
    assert cuda._get_backend_priorities is own
    assert not AttentionBackendEnum.CUSTOM.is_overridden()


def test_custom_backend_of_another_plugin_is_left_alone(platform: Any, vllm_config: Any) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from pyops.integrations.vllm.parts import attention as part

    other = AttentionBackendEnum.TRITON_ATTN.get_path()
    register_backend(AttentionBackendEnum.CUSTOM, other)
    try:
        assert "CUSTOM" not in part.install()
        part.uninstall()
        assert AttentionBackendEnum.CUSTOM.get_path() == other
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


def test_nothing_is_installed_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.platforms

    from pyops.integrations.vllm.parts import attention as part

    monkeypatch.setattr(vllm.platforms._current_platform.__class__, "is_cuda", lambda self: False)
    assert part.install() == ""


@pytest.mark.parametrize(
    ("mode", "query_len", "is_cut"),
    [
        ("NONE", 1, True),
        ("PIECEWISE", 1, True),
        ("FULL_DECODE_ONLY", 1, False),
        ("FULL_AND_PIECEWISE", 1, False),
        ("FULL_AND_PIECEWISE", 2, True),
        ("FULL", 2, False),
    ],
)
def test_tables_are_cut_outside_of_graphs(vllm_config: Any, mode: str, query_len: int, is_cut: bool) -> None:
    """At a power of two, so that slightly different lengths share plans. Graphs are warmed up with other lengths than
    they are captured with, and the plan must be the same."""
    from vllm.config import CUDAGraphMode

    from pyops.integrations.vllm.parts._paged_attention import used_columns

    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    widths = {}
    for length in (1, 16, 17, 32, 33, 65, 256, 257, 480):
        widths[length] = used_columns(
            common_metadata([query_len], [max(length, query_len)], torch.zeros(1, 30).int()), vllm_config, BLOCK_SIZE
        )
    cut = {1: 1, 16: 1, 17: 2, 32: 2, 33: 4, 65: 8, 256: 16, 257: 30, 480: 30}
    assert widths == (cut if is_cut else dict.fromkeys(cut, 30))


def test_draft_tokens_are_captured_too(vllm_config: Any) -> None:
    from vllm.config import CUDAGraphMode

    from pyops.integrations.vllm.parts._paged_attention import used_columns

    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    vllm_config.speculative_config = SimpleNamespace(num_speculative_tokens=3)
    table = torch.zeros(1, 30).int()
    assert [used_columns(common_metadata([n], [9], table), vllm_config, BLOCK_SIZE) for n in (1, 4, 5)] == [30, 30, 1]


def test_one_plan_serves_other_lengths(vllm_config: Any) -> None:
    """The run before a capture, the capture, and an eager step make one plan of each op."""
    from vllm.config import CUDAGraphMode

    import pyops

    layer = make_layer((6, 2), 64, torch.bfloat16, "auto")
    tables = block_tables([300, 300], TABLE_WIDTH, NUM_BLOCKS)
    plans = []
    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    for lengths, longest in (([1, 1], 1), ([1, 1], TABLE_WIDTH * BLOCK_SIZE), ([300, 4], 300)):
        common = common_metadata([1, 1], lengths, tables)
        common.max_seq_len = longest
        q, k, v = torch.randn(2, 10, 64).bfloat16().split((6, 2, 2), 1)
        run(layer, vllm_config, common, q, k, v)
        plans.append(
            {name: len(pyops.registry[name].plans) for name in ("paged_attention_v1", "reshape_and_cache_flash")}
        )
    assert plans[0] == plans[1] == plans[2]
    assert all(plans[0].values())


def test_cache_freed_by_vllm_is_freed(vllm_config: Any) -> None:
    """vLLM first measures memory with a small cache; a layer that then gets another cache uses only that one."""
    layer = make_layer((6, 2), 64, torch.bfloat16, "auto")
    layer.kv_cache = layer.kv_cache.clone()  # not a view of a tensor that would stay alive
    tables = block_tables([5], TABLE_WIDTH, NUM_BLOCKS)
    q, k, v = torch.randn(5, 10, 64).bfloat16().split((6, 2, 2), 1)
    common = common_metadata([5], [5], tables)
    first = run(layer, vllm_config, common, q, k, v)
    memory = StorageWeakRef(layer.kv_cache.untyped_storage())
    layer.kv_cache = layer.kv_cache.clone().fill_(torch.nan)
    assert memory.expired()
    assert torch.equal(run(layer, vllm_config, common, q, k, v), first)
    slots = layer.kv_cache[tables[0, 0], 0, :5]
    assert torch.equal(slots, k)
