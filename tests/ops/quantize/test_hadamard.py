"""The Walsh-Hadamard transform against float64, exact where float32 is exact; in place and into new tensors."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pyops
from pyops import offline
from pyops._core import config
from pyops._core.system import device as devices
from pyops._core.tensors.dtypes import float32
from pyops.example import ArgMaker
from pyops.ops.quantize.hadamard import HadamardConfig, HadamardProblem, choose
from pyops.testing import CONTENTS, Layout, assert_close, assert_matches_reference, filled, same_bits, strategies
from tests.every_op.test_nvrtc import ARCHS, MISSING
from tests.support.calls import DEVICES
from tests.support.quantize_truth import draw, exact, new

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1 << bits for bits in range(16)]


def signs(rows: numpy.ndarray, size: int) -> numpy.ndarray:
    """Rows of Sylvester's matrix: (-1)^popcount(i & j)."""
    odd = rows[:, None] & numpy.arange(size)
    for shift in (8, 4, 2, 1):
        odd = odd ^ odd >> shift
    return 1.0 - 2.0 * (odd & 1)


def truth(x: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix that is the Kronecker product of two smaller ones."""
    size = x.shape[-1]
    left = 1 << (size.bit_length() - 1) // 2
    right = size // left
    matrices = [signs(numpy.arange(n), n) for n in (left, right)]
    products = matrices[0] @ exact(x).reshape(-1, left, right) @ matrices[1]
    return torch.from_numpy(products / size**0.5).reshape(x.shape).to(x.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_unit_vectors(size: int, dtype: torch.dtype, device: str) -> None:
    """Unit vectors with indices of one bit, of all bits, and others: their transforms are rows of the matrix."""
    numbers = numpy.unique(numpy.array([0, size - 1, size // 3, *(1 << bit for bit in range(15))]) % size)
    x = torch.zeros(len(numbers), size, dtype=dtype, device=device)
    x[torch.arange(len(numbers)), torch.from_numpy(numbers)] = 1.0
    y = pyops.hadacore_transform(x, False)
    right = torch.from_numpy(signs(numbers, size)).to(dtype) * torch.tensor(size**-0.5, dtype=dtype)
    assert torch.equal(y.cpu(), right)
    twice = pyops.hadacore_transform(y, False)
    assert torch.equal(twice == 0, x == 0)
    assert torch.equal(twice, x) if dtype != torch.float32 else assert_close(x, twice, 1) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [size for size in SIZES if size <= 4096 and size.bit_length() % 2])
def test_integer_sums_are_exact(size: int, dtype: torch.dtype, device: str) -> None:
    """sqrt(size) is a power of two here, so a result is rounded once: it is the nearest number."""
    generator = torch.Generator().manual_seed(size)
    for rows in (1, 5, 300 if size < 256 else 9):
        x = torch.randint(-8, 9, (rows, size), generator=generator).to(dtype).to(device)
        assert torch.equal(pyops.hadacore_transform(x, False).cpu(), truth(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 8, 128, 2048])
def test_sums_of_zero_are_zero(size: int, dtype: torch.dtype, device: str) -> None:
    """sqrt(size) is no power of two here; sums are exact all the same, because the inexact factor comes last."""
    x = torch.randint(-8, 9, (9, size), generator=torch.Generator().manual_seed(size)).to(dtype)
    x[:, : size // 2] += x[:, size // 2 :].flip(0)  # more elements with sums of 0
    right = truth(x)
    y = pyops.hadacore_transform(x.to(device), False).cpu()
    assert (right == 0).any()
    assert torch.equal(y == 0, right == 0)
    assert_close(right, y, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_any_rows(dtype: torch.dtype, device: str, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(SIZES[:12]))
    x = draw(data.draw(st.integers(1, 9)), size, dtype=dtype, seed=data.draw(st.integers(0, 99))).to(device)
    layouts = [data.draw(strategies.layouts()) for _ in range(2)]
    out = layouts[0].place(new(x.shape, dtype, device))
    pyops.hadacore_transform_out(out, layouts[1].place(x))
    assert_close(truth(x), out.cpu(), 1)
    placed = layouts[1].place(x)
    assert pyops.hadacore_transform(placed) is placed
    assert same_bits(placed, out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [8192, 16384, 32768])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows(dtype: torch.dtype, size: int, device: str) -> None:
    x = draw(2, size, dtype=dtype, device=device)
    assert_close(truth(x), pyops.hadacore_transform(x, False).cpu(), 1)
    layout = Layout(offset=1, gap=2)
    assert same_bits(pyops.hadacore_transform(layout.place(x)), pyops.hadacore_transform(x, False))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [kind for kind in CONTENTS if kind != "extreme"])
@pytest.mark.parametrize("size", [4, 64, 2048])
def test_nan_and_infinity_stay_in_their_row(size: int, kind: str, device: str) -> None:
    """They fill their own rows: infinite where all infinities have one sign, else NaN."""
    x = filled(draw(5, size, dtype=torch.bfloat16), kind)
    if kind in ("nan", "inf"):
        x[3] = 1.0
    with numpy.errstate(invalid="ignore"):
        right = truth(x)
    assert_close(right, pyops.hadacore_transform(x.to(device), False).cpu(), 1)


@pytest.mark.parametrize("device", DEVICES)
def test_sums_that_overflow_before_scaling(device: str) -> None:
    """The sum of two of the largest numbers overflows float32, but its quotient by sqrt(size) does not."""
    x = torch.zeros(1, 4096, dtype=torch.bfloat16, device=device)
    x[0, :2] = torch.finfo(torch.bfloat16).max
    assert torch.equal(pyops.hadacore_transform(x, False).cpu(), truth(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [True, False])
def test_in_place_and_new_output(inplace: bool, device: str) -> None:
    """`x` itself and nothing else, or a new tensor; for any strides, ranks and number of elements."""
    base = draw(6, 8, 32, device=device)
    for x in (
        base.clone(),
        base[0, 0].clone(),
        base.transpose(0, 1),
        base.transpose(1, 2)[:, :, :4],
        base[:, 3, :16],
        base[::2, ::2, ::2],
        base[0, :0],
        base[0, :1, :1],
    ):
        x = x.clone(memory_format=torch.preserve_format) if x.is_contiguous() else x
        before = x.clone()
        y = pyops.hadacore_transform(x, inplace)
        assert (y is x) == inplace
        assert inplace or same_bits(x, before)
        assert_close(truth(before), y.cpu(), 1)
    array = exact(base[0]).astype("float32")
    for view in (array.copy(), array.copy().T[:, ::2]):
        right = truth(torch.from_numpy(view.copy()))
        found = pyops.hadacore_transform(view, inplace)
        assert (found is view) == inplace
        assert_close(right, torch.from_numpy(numpy.ascontiguousarray(found)), 1)


def test_with_less_shared_memory() -> None:
    """A row that does not fit in shared memory is transformed in two parts."""
    op = pyops.registry["hadacore_transform_out"]
    assert op.example is not None
    for arch, rounds in (("sm_80", 1), ("sm_90", 1), ("gfx942", 2)):
        device = devices.model(arch)
        (launch,) = op.launches(*op.example(ArgMaker(device), hidden_size=32768))
        assert launch.specialisation.constants["ROUNDS"] == rounds
        assert launch.shared == 4 * 32768 // rounds <= device.shared_memory
    if devices.model().index < 0:
        x = draw(2, 32768)
        assert_matches_reference(pyops.hadacore_transform_out, torch.empty_like(x), x, warp_sizes=(64,))


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("size", [16384, 32768])
def test_largest_sizes_compile_without_spills(size: int, arch: str) -> None:
    op = pyops.registry["hadacore_transform_out"]
    assert op.example is not None
    for dtype in ("float32", "bfloat16"):
        args = op.example(ArgMaker(devices.model(arch)), hidden_size=size, dtype=dtype)
        (specialisation,) = (launch.specialisation for launch in op.launches(*args))
        report = offline.compile("quantize/hadamard.cu", str(specialisation), specialisation.text, arch)
        assert report.spill_bytes == report.stack_bytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_graph_break(device: str) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return pyops.hadacore_transform(x, False) + pyops.hadacore_transform(x.clone())

    x = draw(3, 64, device=device)
    torch._dynamo.reset()
    assert torch.equal(call(x), torch.compile(call, fullgraph=True, backend="aot_eager")(x))


def test_refused() -> None:
    for size in (0, 3, 12, 65536):
        with pytest.raises(pyops.OpError, match=r"x: expected a last dimension that is a power of two up to 32768"):
            pyops.hadacore_transform(torch.ones(2, size), False)
    with pytest.raises(pyops.OpError, match="x: expected dtype"):
        pyops.hadacore_transform(torch.ones(2, 4).char())
    with pytest.raises(pyops.OpError, match="x: expected at least one dimension"):
        pyops.hadacore_transform(torch.ones(()))
    with pytest.raises(pyops.OpError, match="out: expected shape"):
        pyops.hadacore_transform_out(torch.ones(2, 8), torch.ones(2, 4))
    x = torch.ones(3, 4)
    with pytest.raises(pyops.OpError, match="out: is written, but shares memory with x"):
        pyops.hadacore_transform_out(x[1:], x[:2])
    with config.cpu("kernels"):
        assert pyops.hadacore_transform(torch.ones(0, 4)).shape == (0, 4)


@pytest.mark.parametrize(
    ("size", "arch", "expected"),
    [
        (1, "sm_90", HadamardConfig(elements=1, num_threads=128, rounds=1, min_blocks=12)),
        (256, "sm_90", HadamardConfig(elements=8, num_threads=128, rounds=1, min_blocks=12)),
        (1024, "sm_90", HadamardConfig(elements=32, num_threads=128, rounds=1, min_blocks=8)),
        (4096, "sm_90", HadamardConfig(elements=32, num_threads=128, rounds=1, min_blocks=8)),
        (32768, "sm_90", HadamardConfig(elements=64, num_threads=512, rounds=1, min_blocks=1)),
        (32768, "gfx942", HadamardConfig(elements=64, num_threads=512, rounds=2, min_blocks=1)),
    ],
)
def test_geometry(size: int, arch: str, expected: HadamardConfig) -> None:
    """Short rows have a warp, long ones a block; rows beyond the shared memory are transformed in two parts."""
    assert choose(HadamardProblem(5, size, float32), devices.model(arch)) == expected
