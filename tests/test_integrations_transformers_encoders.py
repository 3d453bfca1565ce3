"""Models that are no decoders: norms and gated MLPs are served, the rest is left to transformers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from pyops import ModelError
from pyops.integrations.transformers import accelerate, norms, report, restore
from pyops.integrations.transformers.trial import Trials, Unknown

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
IMAGE = {"image_size": 32, "patch_size": 8} | SIZES
TEXT = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | SIZES
AUDIO = {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
AUDIO |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4} | SIZES
SAM = SIZES | {"image_size": 64, "patch_size": 16, "output_channels": 16, "window_size": 2, "mlp_dim": 96}
SAM |= {"global_attn_indexes": [0]}
MODELS: dict[str, dict[str, Any]] = {
    "ViT": IMAGE,
    "Dinov2": IMAGE,
    "DINOv3ViT": IMAGE | {"use_gated_mlp": True},
    "SamVision": SAM,
    "CLIP": {"text_config": TEXT, "vision_config": IMAGE},
    "Wav2Vec2": AUDIO,
    "Hubert": AUDIO,
    "ModernBert": TEXT | {"cls_token_id": 1, "sep_token_id": 2},
    "ConvNext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
}


def given(model: Any) -> dict[str, torch.Tensor]:
    """What the model takes."""
    generator, found = torch.Generator().manual_seed(1), {}
    names = inspect.signature(type(model).forward).parameters
    if "pixel_values" in names:
        size = 64 if isinstance(model, transformers.SamVisionModel) else 32
        found["pixel_values"] = torch.randn(2, 3, size, size, generator=generator)
    if "input_values" in names:
        found["input_values"] = torch.randn(2, 400, generator=generator)
    if "input_ids" in names:
        found["input_ids"] = torch.randint(5, 90, (2, 7), generator=generator)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_an_encoder(name: str) -> None:
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**MODELS[name])).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    inputs = given(model)

    def results() -> list[torch.Tensor]:
        with torch.no_grad():
            found = model(**inputs)
        return [value for value in found.values() if isinstance(value, torch.Tensor)]

    theirs = results()
    accelerate(model)
    kinds = {entry.kind for entry in report(model).entries if entry.op}
    assert "LayerNorm" in kinds
    assert not any("Attention" in kind for kind in kinds)
    assert ("DINOv3ViTGatedMLP" in kinds, "ModernBertMLP" in kinds) == (name == "DINOv3ViT", name == "ModernBert")
    for ours, expected in zip(results(), theirs, strict=True):
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    restore(model)
    assert all(map(torch.equal, results(), theirs))


def test_an_encoder_of_another_dtype() -> None:
    model = transformers.ViTModel(transformers.ViTConfig(**IMAGE)).double()
    with pytest.raises(ModelError, match=r"found torch\.float64$"):
        accelerate(model)


class ByDimensions(nn.LayerNorm):
    """A norm that does something else with images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return 2 * found if x.ndim == 4 else found


def test_a_norm_that_depends_on_dimensions() -> None:
    norm = ByDimensions(64)
    found = norms.Norm(norm, torch.float32, Trials())
    for shape in ((5, 64), (2, 5, 64), (2, 3, 5, 64), (2, 2, 3, 5, 64)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            torch.testing.assert_close(found.forward(x), norm(x), rtol=1e-5, atol=1e-5)
    norm.register_buffer("factor", torch.ones(1))
    with pytest.raises(Unknown, match="no op reads its factor"):
        norms.Norm(norm, torch.float32, Trials())
