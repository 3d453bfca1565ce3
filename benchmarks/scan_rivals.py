"""Scans and convolutions of other libraries, called with the arguments of pyops' ops by name.

A rival is a function from these arguments to a call without arguments, which returns the result or writes the output.
It raises Unavailable where the library is absent, or cannot compute the same. Calls that belong to one batch get one
tensor with the starts of its sequences, since these libraries keep what they derive from it by the tensor's identity.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

import pyops

from . import rivals
from .installed import Unavailable, module
from .timing import Call

Arguments = dict[str, Any]
Rival = Callable[[Arguments], Call]

_FLASH_INFER_HEAD = 128  # elements of a head in FlashInfer's delta rule
_VLLM_OPS = "vllm.model_executor.layers"


@cache
def _kept(starts: tuple[int, ...], device: torch.device) -> Any:
    return torch.tensor(starts, device=device)


def _starts(call: Arguments, name: str = "cu_seqlens", device: str = "") -> Any:
    """The rows at which sequences begin, int64, on the device of the arguments unless another is named."""
    found = call[name]
    return _kept(tuple(found.tolist()), torch.device(device) if device else found.device)


def _first_result(function: Callable[..., Any], **named: Any) -> Call:
    return lambda: function(**named)[0]


def fla_chunked(package: str, name: str, call: Arguments) -> Call:
    """A chunked rule of flash-linear-attention. It derives chunks from the starts in host memory."""
    given = ("q", "k", "v", "g", "beta", "scale", "initial_state", "use_qk_l2norm_in_kernel")
    named = {one: call[one] for one in given} | {"output_final_state": True}
    starts = {"cu_seqlens": _starts(call), "cu_seqlens_cpu": _starts(call, device="cpu")}
    return _first_result(getattr(module(package), name), **named, **starts)


def vllm_chunked(package: str, name: str, call: Arguments) -> Call:
    """A chunked rule of vLLM's Triton kernels, with states of values before keys. KDA writes its result over v."""
    given = ("q", "k", "g", "beta", "scale", "use_qk_l2norm_in_kernel")
    named = {one: call[one] for one in given} | {"output_final_state": True, "cu_seqlens": _starts(call)}
    named["v"] = call["v"].clone()
    state = call["initial_state"].transpose(2, 3).contiguous()
    return _first_result(getattr(module(f"{_VLLM_OPS}.fla.ops{package}"), name), **named, initial_state=state)


def vllm_step(package: str, name: str, call: Arguments) -> Call:
    """A rule for one token of each sequence of vLLM's Triton kernels, with states of values before keys."""
    given = ("q", "k", "v", "g", "beta", "scale", "ssm_state_indices", "use_qk_l2norm_in_kernel")
    state = call["state"].transpose(2, 3).contiguous()
    function = getattr(module(f"{_VLLM_OPS}.fla.ops{package}"), name)
    named = {one: call[one] for one in given} | {"initial_state": state, "inplace_final_state": True}
    return _first_result(function, **named, cu_seqlens=_starts(call))


def fla_step(package: str, name: str, call: Arguments) -> Call:
    """A rule for one token of each sequence of flash-linear-attention, which takes states without slots."""
    given = ("q", "k", "v", "g", "beta", "scale", "use_qk_l2norm_in_kernel")
    named = {one: call[one] for one in given} | {"output_final_state": True, "cu_seqlens": _starts(call)}
    state = call["state"][call["ssm_state_indices"].long()]
    return _first_result(getattr(module(package), name), **named, initial_state=state)


def flash_infer_delta_rule(call: Arguments) -> Call:
    """FlashInfer's delta rule. It takes decays instead of logarithms, and normalised queries and keys."""
    function = module("flashinfer.gdn_prefill").chunk_gated_delta_rule
    if call["q"].is_cuda and call["q"].shape[3] != _FLASH_INFER_HEAD:
        raise Unavailable(f"has heads of {_FLASH_INFER_HEAD} elements")
    q, k = (F.normalize(call[name][0].float(), dim=-1).to(call[name].dtype) for name in ("q", "k"))
    v, decay, beta = call["v"][0], call["g"][0].float().exp(), call["beta"][0].float()
    named = {"initial_state": call["initial_state"], "output_final_state": True, "cu_seqlens": _starts(call)}
    # Newer versions split sequences among more blocks, and choose the parts by the longest sequence.
    if "max_seqlen" in inspect.signature(function).parameters:
        named["max_seqlen"] = int(call["cu_seqlens"].diff().max())
    return lambda: function(q, k, v, decay, beta, call["scale"], **named)[0]


def vllm_ssd(call: Arguments) -> Call:
    """vLLM's Triton kernels. They return states."""
    function = module(f"{_VLLM_OPS}.mamba.ops.ssd_combined").mamba_chunk_scan_combined_varlen
    run = partial(function, **{name: value for name, value in call.items() if name != "states"})

    def scan() -> None:
        run()

    return scan


def of_registry(rival: str, op: Any, call: Arguments) -> Call:
    """A rival of `benchmarks.rivals`, with all arguments of the op."""
    bound = inspect.signature(op).bind(**call)
    bound.apply_defaults()
    op = pyops.registry[op.__name__]
    return rivals.RIVALS[rival](op)(*(bound.arguments[one.name] for one in op.parameters))


def vllm_conv(call: Arguments) -> Call:
    """vLLM's Triton kernel. It takes channels before tokens, strided as here, and a schedule made on the host."""
    function = module(f"{_VLLM_OPS}.mamba.ops.causal_conv1d").causal_conv1d_fn
    schedule = module("vllm.v1.attention.backends.utils").compute_causal_conv1d_metadata
    x, names = call["x"], ("query_start_loc", "cache_indices", "has_initial_state")
    starts = _starts(call, "query_start_loc", device="cpu").int()
    parts = zip(("nums_dict", "batch_ptr", "token_chunk_offset_ptr"), schedule(starts, device=x.device), strict=True)
    named = {name: call[name] for name in names} | {"metadata": SimpleNamespace(**dict(parts)), "null_block_id": None}
    states = call["conv_states"].transpose(1, 2)
    run = partial(function, x.t(), call["weight"], call["bias"], states, **named, activation="silu")
    return lambda: run().t()


# {kind of `benchmarks.scan_layers`: {rival: function}}
RIVALS: dict[str, dict[str, Rival]] = {
    "delta_rule": {
        "FLA": partial(fla_chunked, "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        "vLLM": partial(vllm_chunked, "", "chunk_gated_delta_rule"),
        "FlashInfer": flash_infer_delta_rule,
    },
    "kda": {
        "FLA": partial(fla_chunked, "fla.ops.kda", "chunk_kda"),
        "vLLM": partial(vllm_chunked, ".kda", "chunk_kda"),
    },
    "delta_rule_step": {
        "FLA": partial(fla_step, "fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        "vLLM": partial(vllm_step, "", "fused_recurrent_gated_delta_rule"),
    },
    "kda_step": {
        "FLA": partial(fla_step, "fla.ops.kda", "fused_recurrent_kda"),
        "vLLM": partial(vllm_step, ".kda", "fused_recurrent_kda"),
    },
    "ssd": {"vLLM": vllm_ssd},
    "selective_scan": {"vLLM": partial(of_registry, "vllm", pyops.selective_scan_fwd)},
    "conv": {"vLLM": vllm_conv, "torch": partial(of_registry, "torch", pyops.causal_conv1d_prefill)},
}
