"""Kernel, its specialisations, and Launch: what a plan returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import compiler, source
from .compiler import Compiled


class Kernel:
    """A `.cu` file with one entry, named as the file. Nothing is read before the first use.

    `arch_feature` asks for the architecture's own instruction set (``sm_90a`` instead of ``sm_90``) on CUDA.
    """

    def __init__(self, file: str, arch_feature: str | None = None) -> None:
        self.file, self.arch_feature = file, arch_feature
        self._loaded: dict[tuple[Any, ...], Compiled] = {}

    def __call__(self, **constants: Any) -> Specialisation:
        return Specialisation(self, constants)

    @property
    def options(self) -> tuple[str, ...]:
        return (f"--gpu-architecture={self.arch_feature}",) if self.arch_feature else ()

    @property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        """((struct format, name), ...) of the entry."""
        return source.signature(self.file)[1]


class Specialisation:
    """A kernel with values for its constants."""

    __slots__ = ("constants", "kernel")

    def __init__(self, kernel: Kernel, constants: dict[str, Any]) -> None:
        self.kernel, self.constants = kernel, constants

    @property
    def text(self) -> str:
        """The whole source that is compiled."""
        return source.flatten(self.kernel.file, self.constants)

    def __str__(self) -> str:
        return source.describe(self.constants)

    def loaded(self, device: int) -> Compiled | None:
        """The compiled kernel if this process already holds it for the device."""
        return self.kernel._loaded.get((device, *self.constants, *self.constants.values()))

    def load(self, device: int) -> Compiled:
        """The compiled kernel on the device, compiling it if need be."""
        key = (device, *self.constants, *self.constants.values())
        found = self.kernel._loaded.get(key)
        if found is None:
            entry, _ = source.signature(self.kernel.file)
            found = compiler.load(device, self.text, entry, self.kernel.file, str(self), self.kernel.options)
            self.kernel._loaded[key] = found
        return found

    def launch(self, grid: int | tuple[int, ...], block: int, shared: int = 0, **fixed: int | float) -> Launch:
        """A launch of `grid` blocks of `block` threads; `fixed` feeds the kernel's scalar parameters by name."""
        x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
        return Launch(self, (x, y, z), block, shared, fixed)


@dataclass(slots=True, eq=False)
class Launch:
    """A specialisation, its geometry and the scalar arguments that are the same at every call of the plan."""

    specialisation: Specialisation
    grid: tuple[int, int, int]
    block: int
    shared: int
    fixed: dict[str, int | float]

    @property
    def empty(self) -> bool:
        """No block to run. (The driver refuses such a launch, and CuPy would run one block instead.)"""
        return 0 in self.grid
