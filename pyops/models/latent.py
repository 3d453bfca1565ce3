"""Multi-head latent attention as ``config.json`` describes it: that of DeepSeek-V2 and V3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..ops.attention.mla_problem import LATENT_SIZE, ROPE_SIZE
from ..ops.rotary.tables import yarn_mscale
from .config_values import first, flag, number, refuse, size


@dataclass(frozen=True)
class Indexer:
    """The indexer of sparse attention (DeepSeek-AI 2025, DeepSeek-V3.2).

    Attributes:
        num_heads, head_dim: heads of its queries, and elements of a head and of a key.
        top_k: tokens that a query token attends to.
        interleaved: whether adjacent elements rotate as a pair, and not elements of the two halves.
        shares: for each layer, whether it uses the tokens that the layer before it attends to; () for none.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool = False
    shares: tuple[bool, ...] = ()

    def shares_at(self, layer: int) -> bool:
        """Whether a layer uses the tokens of the layer before it."""
        return bool(self.shares) and self.shares[layer]

    @classmethod
    def parse(cls, values: dict[str, Any], heads: int = 64, **options: Any) -> Indexer:
        """Read the sizes from a ``config.json`` object, with the defaults of transformers and `heads` for the heads."""
        names = {"index_n_heads": heads, "index_head_dim": 128, "index_topk": 2048}
        num_heads, head_dim, top_k = (size(name, first(values.get(name), default)) for name, default in names.items())
        return cls(num_heads, head_dim, top_k, **options)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

    Attributes:
        kv_lora_rank: elements of the latent vector, from which keys and values of all heads are projected.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: elements of a head: the part of queries and keys without RoPE,
            the part with RoPE, and values.
        q_lora_rank: elements of the vector from which queries are projected; 0 to project the hidden state.
        interleaved: whether adjacent elements rotate as a pair (GPT-J style), and not elements of the two halves.
        mscale: the logits are multiplied by ``mscale ** 2 / sqrt(qk_head_dim)``.
        indexer: sizes of the indexer of sparse attention; None to attend to all tokens.

    Examples:
        >>> Latent(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128).qk_head_dim
        192
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0
    interleaved: bool = True
    mscale: float = 1.0
    indexer: Indexer | None = None

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            size(name, getattr(self, name))
        if self.q_lora_rank:
            size("q_lora_rank", self.q_lora_rank)
        if self.qk_rope_head_dim % 2:
            raise refuse("qk_rope_head_dim", "an even number", self.qk_rope_head_dim)
        if self.v_head_dim > self.qk_head_dim:
            raise refuse("v_head_dim", f"at most {self.qk_head_dim}, as queries have", self.v_head_dim)
        if self.indexer is not None:
            for name, needed in (("kv_lora_rank", LATENT_SIZE), ("qk_rope_head_dim", ROPE_SIZE)):
                if getattr(self, name) != needed:
                    raise refuse(name, f"{needed} with an indexer", getattr(self, name))
            if not self.q_lora_rank:
                raise refuse("q_lora_rank", "a size with an indexer", None)
            if not self.qk_rope_head_dim <= self.indexer.head_dim:
                raise refuse("index_head_dim", f"at least {self.qk_rope_head_dim}", self.indexer.head_dim)

    @property
    def qk_head_dim(self) -> int:
        """Elements of a head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return float(self.mscale**2 * self.qk_head_dim**-0.5)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Latent:
        """Read the sizes from a ``config.json`` object, with the defaults of transformers."""
        rank = values.get("q_lora_rank", 1536)
        return cls(
            kv_lora_rank=first(values.get("kv_lora_rank"), 512),
            qk_nope_head_dim=first(values.get("qk_nope_head_dim"), 128),
            qk_rope_head_dim=first(values.get("qk_rope_head_dim"), 64),
            v_head_dim=first(values.get("v_head_dim"), 128),
            q_lora_rank=0 if rank is None else size("q_lora_rank", rank),
            interleaved=flag(values, "rope_interleave", True),
            mscale=_mscale(values),
        )


def _mscale(values: dict[str, Any]) -> float:
    """YaRN's factor of queries and of keys, if ``mscale_all_dim`` is given; else 1."""
    found = first(values.get("rope_scaling"), {}) or first(values.get("rope_parameters"), {})
    if not isinstance(found, dict):
        raise refuse("rope_scaling", "an object", found)
    kind = first(found.get("rope_type"), found.get("type"), "default")
    if kind == "default" or not found.get("mscale_all_dim"):
        return 1.0
    factor, all_dim = (number(f"rope_parameters.{name}", found.get(name)) for name in ("factor", "mscale_all_dim"))
    return float(yarn_mscale(factor, all_dim))
