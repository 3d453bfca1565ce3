"""GEMMs with GGUF weights against float64 and the decoder of the `gguf` package."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import gguf
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops import tuning
from pyops._core.launch.kernel import Specialisation
from pyops._core.system import device
from pyops._core.tensors import dtypes
from pyops._core.tensors.tensor import TensorArg
from pyops.ops._shared.ggml_formats import FORMATS
from pyops.ops.linear.ggml_configs import GgmlMulMatConfig, GgmlRowConfig, GgmlSimtConfig, GgmlVecConfig
from pyops.ops.linear.ggml_engines import choose
from pyops.ops.linear.ggml_problem import GgmlProblem, GgmlShape
from pyops.testing import SCHEDULES, Layout, assert_close, cpu, same_bits, scheduled
from tests.support.calls import DEVICES

TYPES = list(FORMATS)


def draw(quant_type: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes [n, bytes of a row] with small scales, their values by the format's own decoder, in float64)."""
    format, kind = FORMATS[quant_type], gguf.GGMLQuantizationType(quant_type)
    random = numpy.random.default_rng(seed)
    blocks = random.integers(0, 256, (n * k // format.length, format.nbytes), dtype="uint8")
    blocks[:, list(format.exponents)] &= 0x9F
    weight = blocks.reshape(n, -1)
    return torch.from_numpy(weight), torch.from_numpy(gguf.quants.dequantize(weight, kind)).double()


def multiply(config: Any, *args: Any, op: str = "ggml_mul_mat_a8", **more: Any) -> torch.Tensor:
    """The op's result with kernels, under a given Config or its own choice."""
    wanted, function = pyops.registry[op], getattr(pyops, op)
    with cpu("kernels"):
        if config is None:
            return function(*args, **more)
        with tuning.forced(op, config):
            wanted.forget()
            found = function(*args, **more)
            wanted.forget()
        return found


def check(got: torch.Tensor, right: torch.Tensor) -> None:
    assert_close(right.to(got.dtype), got.cpu(), ulps=1, atol=2.0**-18)


@pytest.mark.parametrize("quant_type", TYPES, ids=lambda number: FORMATS[number].name)
def test_every_type(quant_type: int) -> None:
    """On tensor cores, by all kernels; the last unit of a row may have fewer blocks of 32 elements."""
    n, k = 17, 768 + (32 if FORMATS[quant_type].length == 32 else 0)
    weight, truth = draw(quant_type, n, k, seed=quant_type)
    for config, m, dtype in (
        (GgmlVecConfig(1, 1, 2, 2), 1, torch.bfloat16),
        (GgmlRowConfig(2, 2), 1, torch.bfloat16),
        (GgmlMulMatConfig(4, 1, 2, 2, 2), 3, torch.float16),
    ):
        x = torch.randn(m, k).to(dtype)
        check(multiply(config, weight, x, quant_type, n), x.double() @ truth.T)


CONFIGS = [
    GgmlVecConfig(1, 2, 4, 3),
    GgmlVecConfig(2, 1, 4, 2),
    GgmlRowConfig(2, 2),
    GgmlMulMatConfig(1, 1, 4, 3, 1),
    GgmlMulMatConfig(16, 2, 2, 2, 1),
    GgmlMulMatConfig(32, 1, 2, 2, 4),
    GgmlSimtConfig(4, 4, 256),
]


@given(
    config=st.sampled_from(CONFIGS),
    quant_type=st.sampled_from([8, 12, 14]),
    m=st.integers(1, 32),
    n=st.integers(1, 70),
    blocks=st.integers(1, 9),
    offsets=st.tuples(st.integers(0, 17), st.integers(0, 9)),
    gap=st.sampled_from([0, 8, 3]),
    seed=st.integers(0, 99),
)
def test_any_shape_and_layout(
    config: Any,
    quant_type: int,
    m: int,
    n: int,
    blocks: int,
    offsets: tuple[int, int],
    gap: int,
    seed: int,
) -> None:
    """Rows of the weight begin at any byte, rows of X and out have gaps; the gaps of out are left alone."""
    k = blocks * FORMATS[quant_type].length
    weight, truth = draw(quant_type, n, k, seed)
    torch.manual_seed(seed)
    x = torch.randn(m, k + gap).bfloat16()[:, :k]
    room = torch.full((m, n + gap), 7.0, dtype=torch.bfloat16)
    weight = Layout(offset=offsets[0]).place(weight)
    got = multiply(
        config, weight, Layout(offset=offsets[1]).place(x) if gap == 0 else x, quant_type, n, out=room[:, :n]
    )
    check(got, x.double() @ truth.T)
    assert (room[:, n:] == 7.0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_large_m(device: str) -> None:
    """For M > 32 the weight is dequantised first; for smaller M the kernel reads it packed."""
    weight, truth = draw(12, 24, 512)
    x = torch.randn(33, 512).bfloat16()
    for m, right in ((33, truth.bfloat16().double()), (32, truth)):
        check(pyops.ggml_mul_mat_vec_a8(weight.to(device), x[:m].to(device), 12, 24), x[:m].double() @ right.T)


def test_exact_accumulation() -> None:
    """All sums are small multiples of a power of two, so nothing is rounded: any order gives the same bits."""
    n, k = 20, 2304  # more k-tiles than stages, under any of the Configs
    weight, truth = draw(8, n, k)
    blocks = weight.view(-1, 34)
    blocks[:, :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)  # scales of 1
    truth = blocks[:, 2:].view(torch.int8).double().view(n, k)
    x = torch.randint(-2, 3, (3, k)).float()
    for config in (*CONFIGS, None):
        got = multiply(
            config, weight, x.to(torch.float32 if isinstance(config, GgmlSimtConfig) else torch.float16), 8, n
        )
        assert same_bits(got.double(), (x.double() @ truth.T).to(got.dtype).double())


def test_cancelling_products() -> None:
    """A small element next to large ones with products that cancel: digit kernels keep its product, integer kernels do
    not."""
    n, k = 20, 768
    weight, truth = draw(8, 1, k)
    blocks = weight.view(-1, 34)
    blocks[:, :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)  # scales of 1
    blocks[:, 2:] = torch.randint(-128, 128, (len(blocks), 1), dtype=torch.int8).view(
        torch.uint8
    )  # one quant to a block
    truth = blocks[:, 2:].view(torch.int8).double().view(1, k)
    x = torch.randint(128, 256, (k // 32, 32)).double() / 128  # below 2, with all mantissa bits of bfloat16
    x[:, 16:] = -x[:, :16]
    x[:, 7], x[:, 23] = x[:, 7] * 2.0**-13, 0.0
    x = x.view(1, k).bfloat16()
    got = multiply(GgmlRowConfig(2, 2), weight.expand(n, -1).contiguous(), x, 8, n)
    assert same_bits(got.double(), (x.double() @ truth.T).to(got.dtype).double().expand(1, n))


def test_nan_and_infinity_stay_in_their_row() -> None:
    """A row of X with an infinity or NaN, which have no digits, gives NaN, and the next row its right values."""
    weight, truth = draw(12, 20, 512)
    x = torch.randn(2, 512).bfloat16()
    for row, value in ((0, torch.inf), (1, torch.nan)):
        special = x.clone()
        special[row, 300] = value
        got = multiply(GgmlRowConfig(4, 2), weight, special, 12, 20)
        assert got[row].isnan().all()
        check(got[1 - row], x[1 - row].double() @ truth.T)


@pytest.mark.parametrize(
    ("core", "arch", "quant_type", "m", "config"),
    [
        ("MFMA", "gfx90a", 8, 3, GgmlMulMatConfig(4, 1, 2, 1, 2)),
        ("MFMA", "gfx90a", 12, 19, GgmlMulMatConfig(32, 2, 2, 1, 1)),
        ("WMMA_11", "gfx1100", 12, 3, GgmlMulMatConfig(4, 1, 2, 1, 1)),
        ("WMMA_12", "gfx1201", 14, 19, GgmlMulMatConfig(32, 4, 1, 1, 2)),
    ],
)
def test_on_matrix_cores(
    core: str, arch: str, quant_type: int, m: int, config: GgmlMulMatConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMD's MMA: types with minima, with and without an offset of the quants, rows of X after the last tile."""
    text, model = Specialisation.text.fget, device.model(arch)  # type: ignore[attr-defined]
    monkeypatch.setattr(device, "_HOST", dict.fromkeys(device._HOST, model))
    monkeypatch.setattr(Specialisation, "text", property(lambda one: f"#define PYOPS_HOST_CORE {core}\n{text(one)}"))
    n, k = 70, 3 * 256
    weight, truth = draw(quant_type, n, k)
    x = torch.randn(m, k).bfloat16()
    for schedule in (SCHEDULES[0], SCHEDULES[3]):
        with scheduled(schedule, warp_size=model.warp_size):
            check(multiply(config, weight, x, quant_type, n), x.double() @ truth.T)


@pytest.mark.parametrize(
    ("arch", "m", "dtype", "quant_type", "config"),
    [
        ("sm_90", 1, dtypes.bfloat16, 12, GgmlRowConfig(8, 2)),
        ("sm_90", 1, dtypes.bfloat16, 13, GgmlVecConfig(1, 1, 4, 2)),
        ("sm_90", 1, dtypes.bfloat16, 8, GgmlVecConfig(1, 1, 4, 2)),
        ("sm_90", 2, dtypes.float16, 12, GgmlVecConfig(2, 1, 4, 2)),
        ("sm_90", 3, dtypes.float16, 12, GgmlMulMatConfig(4, 2, 4, 2, 1)),
        ("sm_80", 9, dtypes.bfloat16, 12, GgmlMulMatConfig(16, 2, 4, 2, 1)),
        ("sm_90", 32, dtypes.bfloat16, 12, GgmlMulMatConfig(32, 2, 4, 2, 1)),
        ("sm_90", 1, dtypes.float32, 12, GgmlSimtConfig(1, 4, 256)),
        ("sm_75", 1, dtypes.float16, 12, GgmlMulMatConfig(1, 2, 4, 1, 1)),
        ("sm_75", 9, dtypes.bfloat16, 12, GgmlSimtConfig(4, 4, 256)),
        ("gfx942", 1, dtypes.bfloat16, 12, GgmlMulMatConfig(1, 1, 4, 1, 1)),
        ("gfx942", 9, dtypes.bfloat16, 12, GgmlMulMatConfig(16, 1, 4, 1, 1)),
        ("gfx90a", 9, dtypes.bfloat16, 12, GgmlMulMatConfig(16, 2, 2, 1, 1)),
        ("gfx1201", 32, dtypes.bfloat16, 12, GgmlMulMatConfig(32, 4, 1, 1, 1)),
        ("gfx942", 2, dtypes.float32, 12, GgmlSimtConfig(2, 4, 256)),
        ("gfx1100", 2, dtypes.bfloat16, 12, GgmlSimtConfig(2, 4, 256)),
    ],
)
def test_choice_of_kernel(arch: str, m: int, dtype: dtypes.DType, quant_type: int, config: Any) -> None:
    on = device.model(arch)
    one = problem(on, m, quant_type=quant_type, dtype=dtype)
    assert choose(one, on) == config
    (launch,) = config.launches(one)
    each = -(-launch.grid[0] // on.num_sms)  # blocks per SM: one more does not fit
    assert arch != "sm_90" or isinstance(config, GgmlSimtConfig) or (each + 1) * launch.shared > on.shared_memory
    for other in config.candidates(one, on):
        assert all(one.block[0] % 64 == 0 for one in other.launches(one))


def problem(
    on: device.Device, m: int, n: int = 4096, k: int = 4096, quant_type: int = 12, dtype: Any = dtypes.bfloat16
) -> GgmlProblem:
    """A problem without experts."""
    format = FORMATS[quant_type]

    def arg(name: str, kind: dtypes.DType, *shape: int) -> TensorArg:
        return TensorArg("op", name, kind, shape, (*shape[1:], 1), 16, on)

    weight = arg("W", dtypes.uint8, n, k // format.length * format.nbytes)
    return GgmlProblem(arg("out", dtype, m, n), weight, arg("X", dtype, m, k), format)


# Times of docs/performance/gguf.md that the rates were not derived from, us: type, rows, N, K, time.
MEASURED = [
    *((12, m, 4096, 4096, us) for m, us in ((8, 6.9), (32, 12.1), (64, 20.0))),
    *((12, m, 28672, 4096, us) for m, us in ((1, 21.5), (2, 28.9), (16, 42.5))),
    (12, 1, 4096, 14336, 13.3),
    *((8, m, 28672, 4096, us) for m, us in ((1, 39.3), (16, 58.8))),
]


def test_times_of_the_model() -> None:
    """Within 14 %, dequantizing first within 26 %; half of them within 6 %."""
    on, off = device.model("sm_90"), []
    for quant_type, m, n, k, us in MEASURED:
        found = choose.fastest(GgmlShape.of(problem(on, m, n, k, quant_type)), on).us
        off.append(abs(math.log(found / us)))
        assert off[-1] < math.log(1.26 if m > 32 else 1.14), (quant_type, m, n, k)
    assert sorted(off)[len(off) // 2] < 0.06


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "gfx942", "gfx1100"])
def test_the_choice_takes_the_least_time(arch: str) -> None:
    """Of every type; all Configs fit, and every shape is served."""
    on = device.model(arch)
    for quant_type in TYPES:
        for m, n in ((0, 64), (1, 768), (2, 4096), (7, 64), (32, 4096), (33, 64), (500, 64)):
            one = problem(on, m, n, 768, quant_type)
            found = choose.candidates(one.shape, on)
            assert choose(one, on) == min(found, key=lambda one: one.us).config
            for candidate in found:
                assert all(one.shared <= on.shared_memory for one in candidate.config.launches(one))


def test_refusals() -> None:
    """Each reason of each engine."""
    on, turing = device.model("sm_90"), device.model("sm_75")
    one, two, many = (problem(on, m).shape for m in (1, 2, 40))
    row, vec, mul_mat, simt, dense = choose.engines
    assert [engine.refusal(one, on) for engine in (row, vec, mul_mat, simt)] == [None] * 4
    assert dense.refusal(many, on) is None
    for engine, shape, device_, words in (
        (row, two, on, "it multiplies one row of X"),
        (row, one, turing, "no cp.async"),
        (row, replace(one, dtype=dtypes.float32), on, "no tensor cores for float32"),
        (vec, problem(on, 3).shape, on, "one or two rows of X"),
        (vec, one, turing, "no cp.async"),
        (vec, replace(one, dtype=dtypes.float32), on, "no tensor cores for float32"),
        (mul_mat, one, device.model("gfx1100"), "WMMA of gfx11"),
        (mul_mat, many, on, "more than 32 rows"),
        (mul_mat, replace(one, dtype=dtypes.float32), on, "no tensor cores for float32"),
        (simt, many, on, "more than 32 rows"),
        (dense, two, on, "up to 32 rows"),
        (dense, replace(many, dense=None), on, "weights of different experts"),
    ):
        assert words in (engine.refusal(shape, device_) or ""), (engine.name, words)


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"quant_type": 15}, "quant_type"),
        ({"quant_type": 14}, "W"),
        ({"row": -1}, "row"),
        ({"row": 5}, "W"),
        ({"W": torch.zeros(4, 143, dtype=torch.uint8)}, "W"),
        ({"W": torch.zeros(4, 144)}, "W"),
        ({"X": torch.zeros(2, 128)}, "X"),
        ({"X": torch.zeros(2, 256, dtype=torch.float64)}, "X"),
        ({"X": torch.zeros(256)}, "X"),
        ({"out": torch.zeros(2, 4, dtype=torch.float16)}, "out"),
        ({"out": torch.zeros(3, 4)}, "out"),
    ],
)
def test_refused(changed: dict[str, Any], argument: str) -> None:
    given = {
        "W": torch.zeros(4, 144, dtype=torch.uint8),
        "X": torch.zeros(2, 256),
        "quant_type": 12,
        "row": 4,
    } | changed
    with pytest.raises(pyops.OpError) as caught:
        pyops.ggml_mul_mat_a8(**given)
    assert caught.value.argument == argument


# Experts


def by_loop(x: torch.Tensor, truth: torch.Tensor, experts: torch.Tensor, top_k: int) -> torch.Tensor:
    """float64, one choice after another; zeros for an expert id out of range."""
    rows = [
        truth[e] @ x[c // top_k].double() if 0 <= e < len(truth) else torch.zeros(truth.shape[1]).double()
        for c, e in enumerate(experts.flatten().tolist())
    ]
    return torch.stack(rows)


@pytest.mark.parametrize(("dtype", "index"), [(torch.bfloat16, torch.int32), (torch.float32, torch.int64)])
def test_expert_gemm(dtype: torch.dtype, index: torch.dtype) -> None:
    """In the order of `moe_align_block_size`, and without one; expert ids out of range give zeros."""
    tokens, top_k, experts, n, k = 9, 3, 5, 20, 512
    weight, truth = draw(12, experts * n, k)
    weight, truth = weight.view(experts, n, -1), truth.view(experts, n, k)
    x, ids = torch.randn(tokens, k).to(dtype), torch.randint(0, experts, (tokens, top_k), dtype=torch.int32)
    block = pyops.ggml_moe_get_block_size(12)
    places, of_blocks, count = pyops.moe_align_block_size.new(ids, experts, block)
    places = torch.nn.functional.pad(places, (0, block - 1))  # vLLM's lists have slots after the last whole block
    sorted_ = (places.to(index), of_blocks.to(index), count.to(index))
    got = multiply(None, x, weight, *sorted_, 12, n, top_k, tokens, op="ggml_moe_a8")
    check(got, by_loop(x, truth, ids, top_k))
    ids[3, 1], ids[5, 2] = experts, -1
    got = multiply(None, x, weight, ids.to(index), top_k, 12, n, tokens, op="ggml_moe_a8_vec")
    check(got, by_loop(x, truth, ids, top_k))


def test_hostile_slots() -> None:
    """Slots and expert ids out of range, and a count beyond all slots: nothing else is read or written."""
    weight, truth = draw(12, 2 * 16, 256)
    x, big = torch.randn(4, 256).bfloat16(), 2**31 - 1
    places = torch.tensor([0, -1, 4, big, 1, 2, -big, 4, 3, 4, 4, 4], dtype=torch.int32)
    of_blocks = torch.tensor([1, 7, -3], dtype=torch.int32)
    out = torch.full((4, 16), 5.0).bfloat16()
    args = (x, weight.view(2, 16, -1), places, of_blocks, torch.tensor([big], dtype=torch.int32), 12, 16, 1, 4)
    got = multiply(None, *args, op="ggml_moe_a8", out=out)
    check(got[:1], x[:1].double() @ truth[16:].T)
    assert (got[1:] == 0.0).all()
    # A count of zero leaves everything alone.
    args = (*args[:4], torch.tensor([-5], dtype=torch.int32), *args[5:])
    assert (multiply(None, *args, op="ggml_moe_a8", out=torch.full((4, 16), 5.0).bfloat16()) == 5.0).all()


def test_block_sizes() -> None:
    assert [pyops.ggml_moe_get_block_size(number) for number in (12, 29, 0, 15, -1)] == [4, 4, 0, 0, 0]
