"""Tensors with any size, memory layout and contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..._core.tensors import dtypes
from ..contents import CONTENTS, filled
from ..memory import Layout

DTYPES = tuple(dtype.name for dtype in dtypes.FLOATS)
# Sizes next to multiples of vectors, warps and CUDA blocks.
_SIZES = st.integers(1, 40) | st.sampled_from([63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025])


def generator(seed: int) -> torch.Generator:
    """A generator of random values on the CPU."""
    return torch.Generator().manual_seed(seed)


def seeds() -> st.SearchStrategy[int]:
    """Seeds from a small range, so that hypothesis finds a small one."""
    return st.integers(0, 99)


def shapes(dims: int = 2, *, rows: st.SearchStrategy[int] | None = None) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of `dims` dimensions: rows of up to 1025 elements, and 1 to 9 along every other dimension.

    Examples:
        >>> @given(shape=shapes(3))
        ... def test(shape):
        ...     assert torch.empty(shape).ndim == 3
        >>> test()
    """
    return st.tuples(*[rows if rows is not None else st.integers(1, 9)] * (dims - 1), _SIZES)


def layouts() -> st.SearchStrategy[Layout]:
    """Layouts that start up to 7 elements after an aligned address, with gaps of up to 9 elements between rows.

    Examples:
        >>> @given(layout=layouts())
        ... def test(layout):
        ...     assert 0 <= layout.offset <= 7
        >>> test()
    """
    return st.builds(Layout, st.integers(0, 7), st.integers(0, 9), st.sampled_from([None, None, 0, 1, 3]))


@st.composite
def contents(draw: st.DrawFn, shape: Sequence[int], dtype: str = "float32", kinds: Sequence[str] = CONTENTS) -> Tensor:
    """Contiguous CPU tensors of a float type, filled in one of `kinds`: see `pyops.testing.filled`.

    Examples:
        >>> @given(x=contents((3, 100), "float16", kinds=["nan", "inf"]))
        ... def test(x):
        ...     assert not x.isfinite().all()
        >>> test()
    """
    kind, seed = draw(st.sampled_from(kinds), label="contents"), draw(seeds(), label="seed")
    drawn = torch.randn(tuple(shape), generator=generator(seed), dtype=torch.float32, device="cpu")
    return filled(drawn.to(getattr(torch, dtype)), kind)


@st.composite
def tensors(
    draw: st.DrawFn,
    shape: Sequence[int] | st.SearchStrategy[tuple[int, ...]] | None = None,
    dtype: str | st.SearchStrategy[str] | None = None,
    *,
    kinds: Sequence[str] = CONTENTS,
    expanded: bool = False,
) -> Tensor:
    """CPU tensors in any of `layouts` with any of `contents`.

    Args:
        shape: the shape, or a strategy of shapes; `shapes()` unless given.
        dtype: "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz" or "float8_e5m2", or a strategy of
            them; one of the first three unless given.
        kinds: of the contents.
        expanded: whether a dimension before the last may be expanded (stride 0). Not for outputs.

    Examples:
        >>> @given(input=tensors((3, 100), "float32"))
        ... def test_relu2(input):
        ...     assert_matches_reference(pyops.relu2, torch.empty_like(input), input, schedules=SCHEDULES[:1])
        >>> test_relu2()
    """
    sizes = _drawn(draw, shapes() if shape is None else shape)
    name = _drawn(draw, st.sampled_from(DTYPES) if dtype is None else dtype)
    layout = draw(layouts(), label="layout")
    once = list(sizes)
    if expanded and len(once) > 1 and (dim := draw(st.integers(-1, len(once) - 2), label="expanded dimension")) >= 0:
        once[dim] = min(1, once[dim])
    return layout.place(draw(contents(once, name, kinds))).expand(sizes)


def _drawn(draw: st.DrawFn, value: Any) -> Any:
    return draw(value) if isinstance(value, st.SearchStrategy) else value
