"""Resources of a compiled kernel, from the metadata of its code object."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

_AMDGPU_METADATA = 32  # type of a note, from LLVM's User Guide for AMDGPU Backend


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel.

    Attributes:
        vgprs, sgprs: vector registers of a lane, scalar registers of a wave.
        lds: static bytes of a block's shared memory.
        scratch: bytes of memory of a lane that hold spilled registers and arrays.
        vgpr_spills: vector registers in scratch memory; sgpr_spills: scalar registers in lanes of vector registers.
    """

    vgprs: int
    sgprs: int
    lds: int
    scratch: int
    vgpr_spills: int
    sgpr_spills: int


def resources(code: bytes) -> Resources:
    """The resources of the one kernel of a code object."""
    kernel = metadata(code)
    return Resources(
        kernel[".vgpr_count"],
        kernel[".sgpr_count"],
        kernel[".group_segment_fixed_size"],
        kernel[".private_segment_fixed_size"],
        kernel[".vgpr_spill_count"],
        kernel[".sgpr_spill_count"],
    )


def metadata(code: bytes) -> dict[str, Any]:
    """The entry of LLVM's User Guide for AMDGPU Backend for the one kernel of a code object."""
    # A machine with a GPU has these two packages only if this project's extra `test` is installed.
    import msgpack
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import NoteSection

    for section in ELFFile(io.BytesIO(code)).iter_sections():
        if isinstance(section, NoteSection):
            for note in section.iter_notes():
                if note["n_type"] in (_AMDGPU_METADATA, "NT_AMDGPU_METADATA"):
                    (kernel,) = msgpack.unpackb(note["n_descdata"])["amdhsa.kernels"]
                    return kernel
    raise ValueError("the code object has no metadata of AMD's")
