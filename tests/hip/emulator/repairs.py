"""Fixes, in memory, of what the emulator of that commit lacks or gets wrong. Each fix says why.

Nothing here is specific to this library: the reasons are AMD's instruction set architectures and LLVM's code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from . import fp8

Handler = Callable[[Any, Any], Any]

# Instructions for caches, which the emulator does not have, and for float modes, which LLVM changes only around a
# division.
_WITHOUT_EFFECT = re.compile(r"(_INV|_WB|_WBINV|_WBL2)$|^S_SETREG")
_SUMS_OF_WMMA = (
    (
        "  src2_r = (src2_r >= 256).where(src2_r - _c(256), src2_r)\n",
        "  in_vgprs = src2_r >= _c(256)\n"
        "  scalar = ctx.rsgpr_dyn(src2_r, in_vgprs.ne(True))\n"
        "  src2_r = in_vgprs.where(src2_r - _c(256), _c(0))\n",
    ),
    (
        "    mat_c = [ctx.rvgpr_dyn(src2_r + _c(vgpr), UOp.const(lane, dtypes.int)).bitcast(out_dt)\n",
        "    mat_c = [in_vgprs.where(ctx.rvgpr_dyn(src2_r + _c(vgpr), UOp.const(lane, dtypes.int)), scalar)\n"
        "             .bitcast(out_dt)\n",
    ),
)


def apply(emu: Any, arch: str) -> None:
    """Fix the emulator's module for the architecture. Once per process."""
    _keep_subnormals(emu)
    _decode_invalidations(emu)
    _read_operands_of_conversions(emu)
    _address_flat_memory(emu)
    _multiply_bytes(emu)
    _return_what_atomics_read(emu)
    fp8.apply(emu, arch)
    if arch in ("gfx942", "gfx950"):
        _keep_whole_registers(emu)
    for kind, handler in list(emu._INST_HANDLERS.items()):
        emu._INST_HANDLERS[kind] = _mended(emu, handler)


def _keep_subnormals(emu: Any) -> None:
    """The emulator flushes subnormal floats always; a kernel says whether, and code_object.py refuses one that does."""
    emu._get_ftz_lib = lambda: (None, 0)


def _return_what_atomics_read(emu: Any) -> None:
    """An atomic operation returns the old value if a bit is set: sc0 on CDNA, th on RDNA 4; the emulator knows only
    glc."""
    attribute = emu._iattr

    def named(inst: Any, name: str, default: int = 0) -> int:
        if name == "glc" and not hasattr(inst, "glc"):
            return int(attribute(inst, "sc0") or attribute(inst, "th") & 1)
        return int(attribute(inst, name, default))

    emu._iattr = named


def _decode_invalidations(emu: Any) -> None:
    """Of RDNA 3's format MUBUF, which the emulator does not decode, LLVM uses only cache invalidations."""
    from tinygrad.renderer import amd

    amd._load_formats()["rdna3"].append(emu.ir3.MUBUF)
    emu._INST_HANDLERS[emu.ir3.MUBUF] = _refused


def _refused(inst: Any, ctx: Any) -> Any:
    raise NotImplementedError(f"{inst} of RDNA 3")


def _address_flat_memory(emu: Any) -> None:
    """The emulator computes addresses itself, and RDNA 4's pseudocode for flat accesses would compute them a second
    time.

    A flat address of shared memory is invalid in this process, and ends it.
    """
    find = emu.get_pcode

    def get_pcode(op: Any) -> str:
        text = str(find(op))
        return (
            re.sub(r"addr = CalcFlatAddr\([^)]*\);?\n?", "", text).replace("MEM[addr", "MEM[ADDR")
            if "Flat" in text
            else text
        )

    emu.get_pcode = get_pcode


def _multiply_bytes(emu: Any) -> None:
    """MFMA of int8 stores int32 in an array of uint32, which does not compile.

    WMMA of fp8 reads its operands as float16, and WMMA reads a vector register where its third operand is a constant,
    such as the 0 of an initial accumulator.
    """
    text = inspect.getsource(emu._compile_wmma)
    for old, new in _SUMS_OF_WMMA:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    exec(compile(text, "wmma", "exec"), vars(emu))
    mfma, wmma = emu._compile_mfma, emu._compile_wmma

    def compile_mfma(inst: Any, ctx: Any) -> Any:
        placeholder = emu.UOp.placeholder
        if "I8" not in emu._op_name(inst):
            return mfma(inst, ctx)
        emu.UOp.placeholder = lambda shape, dtype, *rest, **how: placeholder(shape, emu.dtypes.int32, *rest, **how)
        try:
            return mfma(inst, ctx)
        finally:
            emu.UOp.placeholder = placeholder

    def compile_wmma(inst: Any, ctx: Any) -> Any:
        halves, name = emu._FUNCS["f16_to_f32"], emu._op_name(inst)
        kind = name.rsplit("_", 1)[-1].lower()
        if kind in ("fp8", "bf8"):
            assert name.lower().endswith(f"{kind}_{kind}"), name
            emu._FUNCS["f16_to_f32"] = emu._FUNCS[f"{kind}_to_f32"]
        try:
            return wmma(inst, ctx)
        finally:
            emu._FUNCS["f16_to_f32"] = halves

    emu._compile_mfma, emu._compile_wmma = compile_mfma, compile_wmma


def _read_operands_of_conversions(emu: Any) -> None:
    """RDNA 4's pseudocode for conversions from fp8 names a vector register by SRC0 and OPSEL, which only some handlers
    set."""
    for name in ("V_CVT_F32_FP8", "V_CVT_F32_BF8", "V_CVT_PK_F32_FP8", "V_CVT_PK_F32_BF8"):
        emu._pcode_fixes[name] = ("VGPR[laneId][SRC0.u32]", "S0")
    parse = emu.parse_pcode
    emu.parse_pcode = lambda text, srcs: parse(text, {"OPSEL": emu._c(0), **srcs})


def _keep_whole_registers(emu: Any) -> None:
    """16-bit operands from register 128 on are upper halves of the first 128 registers on RDNA, but not on CDNA.

    The emulator takes them for halves on both: `v_cvt_f32_f16 v0, v168` reads v40.
    """
    for name in ("_load_vsrc0", "_compile_vop12", "_compile_vopc"):
        taken = getattr(emu, name)
        text = inspect.getsource(taken)
        whole = text.replace(">= _c(384)", ">= _c(512)").replace(">= _c(128)", ">= _c(256)")
        assert whole != text, name
        exec(compile(whole, name, "exec"), vars(emu))
        for kind, handler in emu._INST_HANDLERS.items():
            if handler is taken:
                emu._INST_HANDLERS[kind] = getattr(emu, name)


def _mended(emu: Any, handler: Handler) -> Handler:
    def handle(inst: Any, ctx: Any) -> Any:
        name = emu._op_name(inst)
        if _WITHOUT_EFFECT.search(name):
            return emu.UOp.sink(*ctx.inc_pc())
        if name == "S_GETPC_B64":
            return _get_pc(emu, inst, ctx)
        if handler is emu._compile_sdwa:
            return _with_modifiers(emu, inst, ctx)
        if type(inst).__name__ == "DS":
            ctx.__class__ = _lanes_that_are_on(emu) if "D16" not in name else _halves(emu, name.endswith("_HI"))
        if type(inst) is emu.irc.FLAT:
            ctx.__class__ = _without_scalar_address(emu)
        return handler(inst, ctx)

    return handle


def _get_pc(emu: Any, inst: Any, ctx: Any) -> Any:
    """The emulator has no pseudocode for S_GETPC_B64, by which LLVM finds constants: the address of the next
    instruction."""
    register = ctx.inst_field(type(inst).sdst)
    words = emu._split64(ctx.rpc() + emu.UOp.const(4, emu.dtypes.uint64))
    stores = [ctx.wsgpr_dyn(register + emu._c(i), word) for i, word in enumerate(words)]
    return emu.UOp.sink(*stores, *ctx.inc_pc())


def _with_modifiers(emu: Any, inst: Any, ctx: Any) -> Any:
    """The emulator ignores the absolute value and the sign of SDWA's operands."""
    select, bits = emu._sdwa_select, inst.canonical_op_bits
    second = hasattr(type(inst), "src1_sel") and ctx.inst_field(type(inst).src1_sel)

    def select_modified(value: Any, sel: Any, sext: Any) -> Any:
        i = int(sel is second)
        absolute, negative = (emu._iattr(inst, f"src{i}_{what}") for what in ("abs", "neg"))
        return emu._apply_src_mods(select(value, sel, sext), 0, absolute, negative, bits[f"s{i}"])

    emu._sdwa_select = select_modified
    try:
        return emu._compile_sdwa(inst, ctx)
    finally:
        emu._sdwa_select = select


def _without_scalar_address(emu: Any) -> type:
    """CDNA's flat accesses have no scalar address: the field is 0, which the emulator takes for s0."""

    class Flat(emu._Ctx):
        __slots__ = ()

        def optional_field(self, inst: Any, name: str) -> Any:
            return emu._c(0x7F) if name == "saddr" else super().optional_field(inst, name)

    return Flat


def _lanes_that_are_on(emu: Any) -> type:
    """An inactive lane has a garbage address, at which the emulator reads shared memory all the same."""

    class LanesOn(emu._Ctx):  # type: ignore[misc, name-defined]
        __slots__ = ()

        def rvgpr_dyn(self, reg: Any, lane: Any, valid: Any = None) -> Any:
            value = super().rvgpr_dyn(reg, lane, valid)
            return emu._lane_active(self.rexec(), lane).where(value, emu._c(0))

    return LanesOn


def _halves(emu: Any, high: bool) -> type:
    """16-bit loads from shared memory keep the other half of the register, which the emulator overwrites."""

    class Half(_lanes_that_are_on(emu)):  # type: ignore[misc]
        __slots__ = ()

        def wvgpr_dyn(self, reg: Any, lane: Any, val: Any, exec_mask: Any, after: Any = None) -> Any:
            old, new = self.rvgpr_dyn(reg, lane), val.cast(emu.dtypes.uint32) & 0xFFFF
            whole = (old & 0xFFFF) | (new << 16) if high else (old & 0xFFFF0000) | new
            return super().wvgpr_dyn(reg, lane, whole, exec_mask, after)

    return Half
