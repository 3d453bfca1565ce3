"""Which lines of the sources an instruction of a shared object comes from, as its debugging information has it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any


def places(library: str, address: int) -> list[tuple[str, int]]:
    """(file, line) of the instruction, and of the calls around it that were inlined, innermost first.

    Empty where pyelftools is not installed, and for what was compiled from no line.
    """
    try:
        from elftools.elf.elffile import ELFFile
    except ImportError:
        return []
    with open(library, "rb") as opened:
        elf = ELFFile(opened)
        if not elf.has_dwarf_info():
            return []
        dwarf = elf.get_dwarf_info()
        for unit in dwarf.iter_CUs():
            program = dwarf.line_program_for_CU(unit)
            here = _row(program, address)
            if here is not None:
                calls = [(at["DW_AT_call_file"], at["DW_AT_call_line"]) for at in _inlined(dwarf, unit, address)]
                found = ((here.file, here.line), *reversed(calls))
                return [(_name(program, file), line) for file, line in found if line]
    return []


def _row(program: Any, address: int) -> Any:
    """The row of a line table that covers an address, or None."""
    before = None
    for entry in program.get_entries():
        row = entry.state
        if row is None:
            continue
        if before is not None and before.address <= address < row.address:
            return before
        before = None if row.end_sequence else row
    return None


def _inlined(dwarf: Any, unit: Any, address: int) -> Iterator[dict[str, int]]:
    """The attributes of the inlined calls that an address is in, outermost first.

    Each is asked: a lambda's code lies in no function that its entry lies in.
    """
    for entry in unit.iter_DIEs():
        pieces = _ranges(dwarf, unit, entry.attributes) if entry.tag == "DW_TAG_inlined_subroutine" else ()
        if any(begin <= address < end for begin, end in pieces):
            yield {name: attribute.value for name, attribute in entry.attributes.items()}


def _ranges(dwarf: Any, unit: Any, at: Any) -> Iterator[tuple[int, int]]:
    """(begin, end) of each piece of code of an entry with these attributes."""
    if "DW_AT_high_pc" in at:
        low, high = at["DW_AT_low_pc"].value, at["DW_AT_high_pc"]
        yield low, (high.value if high.form == "DW_FORM_addr" else low + high.value)
    elif "DW_AT_ranges" in at:
        base = unit.get_top_DIE().attributes.get("DW_AT_low_pc")
        start = base.value if base is not None else 0
        for part in dwarf.range_lists().get_range_list_at_offset(at["DW_AT_ranges"].value, cu=unit):
            if hasattr(part, "base_address"):
                start = part.base_address
            else:
                offset = 0 if part.is_absolute else start
                yield offset + part.begin_offset, offset + part.end_offset


def _name(program: Any, index: int) -> str:
    """The path of a file: its folder, which may be relative to where the compiler ran, and its name."""
    first = 0 if program["version"] >= 5 else 1
    file = program["file_entry"][index - first]
    folders = program["include_directory"]
    folder = folders[file.dir_index - first].decode() if file.dir_index >= first and folders else ""
    return os.path.join(folder, file.name.decode())
