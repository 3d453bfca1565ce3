"""A code object of hiprtc in this process's memory, and its launch by the emulator, as the HSA runtime would do it.

The structures are those of LLVM's User Guide for AMDGPU Backend: code object, kernel descriptor, kernel arguments.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import struct
from collections.abc import Iterator
from typing import Any

from ..metadata import metadata

Size = tuple[int, int, int]
_RELATIVE = 13  # R_AMDGPU_RELATIVE64
_EXPLICIT = ("by_value", "global_buffer")  # arguments of the kernel's own signature
_FORMATS = {2: "<H", 4: "<I", 8: "<Q"}
_LDS_GRANULE = 512  # bytes, as the emulator counts
_KEPT = 3  # mode of subnormal floats: neither operands nor results are flushed


class CodeObject:
    """The one kernel of `code`, at an address."""

    def __init__(self, code: bytes) -> None:
        from elftools.elf.elffile import ELFFile
        from elftools.elf.relocation import RelocationSection

        elf = ELFFile(io.BytesIO(code))
        segments = [segment for segment in elf.iter_segments() if segment["p_type"] == "PT_LOAD"]
        self.size = max(segment["p_vaddr"] + segment["p_memsz"] for segment in segments)
        self._memory = mmap.mmap(-1, self.size + mmap.PAGESIZE)  # an instruction is decoded from 16 bytes
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for segment in segments:
            self._memory[segment["p_vaddr"] : segment["p_vaddr"] + segment["p_filesz"]] = segment.data()
        for section in elf.iter_sections():
            if isinstance(section, RelocationSection):
                for one in section.iter_relocations():
                    assert one["r_info_type"] == _RELATIVE, one
                    struct.pack_into("<Q", self._memory, one["r_offset"], self._base + one["r_addend"])
        self._kernel = metadata(code)
        (symbol,) = elf.get_section_by_name(".dynsym").get_symbol_by_name(self._kernel[".symbol"])
        self._read_descriptor(symbol["st_value"])

    def _read_descriptor(self, at: int) -> None:
        self._lds, self._scratch = struct.unpack_from("<II", self._memory, at)
        (entry,) = struct.unpack_from("<q", self._memory, at + 16)
        self._entry = self._base + at + entry
        rsrc1, self._rsrc2, self._properties, preloaded = struct.unpack_from("<IIHH", self._memory, at + 48)
        if preloaded:
            raise NotImplementedError("arguments in registers at the start of a kernel")
        if rsrc1 >> 16 & 3 != _KEPT:
            raise NotImplementedError("a kernel that flushes subnormal floats")

    def launch(self, emulator: Any, family: str, grid: Size, block: Size, shared: int, parameters: int) -> None:
        """Run every block. `parameters` is the address of an array with a pointer to each parameter."""
        arguments = self._arguments(grid, block, shared, parameters)
        packet = ctypes.create_string_buffer(64)  # hsa_kernel_dispatch_packet_t
        threads = (size * blocks for size, blocks in zip(block, grid, strict=True))
        struct.pack_into("<HHHHHHIIIII", packet, 0, 0, 3, *block, 0, *threads, self._scratch, self._lds + shared)
        addresses = ctypes.addressof(packet), ctypes.addressof(arguments)
        granules = -(-(self._lds + shared) // _LDS_GRANULE)
        rsrc2 = self._rsrc2 & ~(0x1FF << 15) | granules << 15
        registers = list(self._registers(*addresses))
        emulator.run_asm(self._entry, self.size, *grid, *block, addresses[1], rsrc2, self._scratch, family, registers)

    def _arguments(self, grid: Size, block: Size, shared: int, parameters: int) -> Any:
        """The segment of kernel arguments: those of the signature, and hidden ones."""
        hidden = {"hidden_grid_dims": 3, "hidden_dynamic_lds_size": shared}
        for i, axis in enumerate("xyz"):
            hidden |= {f"hidden_block_count_{axis}": grid[i], f"hidden_group_size_{axis}": block[i]}
        segment = ctypes.create_string_buffer(self._kernel[".kernarg_segment_size"] + 64)
        given = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        position = 0
        for one in self._kernel[".args"]:
            offset, size = one[".offset"], one[".size"]
            if one[".value_kind"] in _EXPLICIT:
                ctypes.memmove(ctypes.addressof(segment) + offset, given[position], size)
                position += 1
            else:
                struct.pack_into(_FORMATS[size], segment, offset, hidden.get(one[".value_kind"], 0))
        return segment

    def _registers(self, packet: int, arguments: int) -> Iterator[int]:
        """The scalar registers that the kernel descriptor asks for, in their order."""
        words = (
            (0, 0, 0, 0),  # private segment buffer
            (packet & 0xFFFFFFFF, packet >> 32),
            (0, 0),  # queue
            (arguments & 0xFFFFFFFF, arguments >> 32),
            (0, 0),  # id of the dispatch
            (0, 0),  # flat scratch
            (self._scratch,),
        )
        found = [word for bit, every in enumerate(words) if self._properties >> bit & 1 for word in every]
        yield from found
        yield from [0] * ((self._rsrc2 >> 1 & 31) - len(found))
