"""Models without a decoder: norms, gated MLPs and bidirectional attention are served, the rest is left alone."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from pyops import ModelError
from pyops.integrations.transformers import accelerate, encoders, norms, report, restore
from pyops.integrations.transformers.encoders import Masks
from pyops.integrations.transformers.trial import Trials, Unknown

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
IMAGE = {"image_size": 32, "patch_size": 8} | SIZES
TEXT = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | SIZES
AUDIO = {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
AUDIO |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4} | SIZES
SAM = SIZES | {"image_size": 64, "patch_size": 16, "output_channels": 16, "window_size": 2, "mlp_dim": 96}
SAM |= {"global_attn_indexes": [0]}
WHISPER = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "num_mel_bins": 8}
WHISPER |= {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "max_source_positions": 20}
WHISPER |= {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
MODELS: dict[str, dict[str, Any]] = {
    "ViT": IMAGE,
    "Dinov2": IMAGE,
    "DINOv3ViT": IMAGE | {"use_gated_mlp": True},
    "SamVision": SAM,
    "CLIP": {"text_config": TEXT, "vision_config": IMAGE},
    "Wav2Vec2": AUDIO,
    "Hubert": AUDIO,
    "ModernBert": TEXT | {"cls_token_id": 1, "sep_token_id": 2},
    "Bert": TEXT,
    "Roberta": TEXT,
    "Albert": TEXT | {"embedding_size": 32},
    "SiglipVision": IMAGE,
    "Whisper": WHISPER,
    "T5Encoder": {"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    "ConvNext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
}


# {model: how many of its attentions are served}. A layer of ModernBERT has a window; both towers of CLIP take a mask.
SERVED = {"ViT": 2, "Dinov2": 2, "DINOv3ViT": 2, "CLIP": 4, "Wav2Vec2": 2, "Hubert": 2, "ModernBert": 1, "Bert": 2}
SERVED |= {"Roberta": 2, "Albert": 1, "SiglipVision": 2, "Whisper": 2}


def model_of(name: str, **options: Any) -> Any:
    """A model with random biases and norms."""
    torch.manual_seed(1)
    config = f"{name.removesuffix('Encoder')}Config"
    made = getattr(transformers, f"{name}Model")(getattr(transformers, config)(**MODELS[name] | options)).eval()
    for parameter in made.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record (queries, keys) of each call of the op by an attention."""
    found, op = [], encoders.attention_varlen

    def called(out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *args: Any) -> None:
        found.append((len(query), len(key)))
        op(out, query, key, *args)

    monkeypatch.setattr(encoders, "attention_varlen", called)
    return found


def given(model: Any) -> dict[str, torch.Tensor]:
    """The model's inputs."""
    generator, found = torch.Generator().manual_seed(1), {}
    names = inspect.signature(type(model).forward).parameters
    if "pixel_values" in names:
        size = 64 if isinstance(model, transformers.SamVisionModel) else 32
        found["pixel_values"] = torch.randn(2, 3, size, size, generator=generator)
    if "input_values" in names:
        found["input_values"] = torch.randn(2, 400, generator=generator)
    if "input_ids" in names:
        found["input_ids"] = torch.randint(5, 90, (2, 7), generator=generator)
        found["attention_mask"] = torch.tensor([[1] * 7, [0, 1, 1, 1, 1, 0, 0]])
    if "input_features" in names:
        found["input_features"] = torch.randn(2, 8, 40, generator=generator)
        found["decoder_input_ids"] = torch.randint(5, 90, (2, 3), generator=generator)
    return found


def results(model: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        found = model(**inputs)
    return [value for value in found.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", MODELS)
def test_encoder(name: str, calls: list[tuple[int, int]]) -> None:
    """Two texts are padded, on either side; the hidden states of padding agree, too."""
    model = model_of(name)
    inputs = given(model)
    theirs = results(model, inputs)
    accelerate(model)
    kinds = {entry.kind for entry in report(model).entries if entry.op}
    assert name == "T5Encoder" or "LayerNorm" in kinds
    assert ("DINOv3ViTGatedMLP" in kinds, "ModernBertMLP" in kinds) == (name == "DINOv3ViT", name == "ModernBert")
    assert sum(entry.op == encoders.EncoderAttention.op for entry in report(model).entries) == SERVED.get(name, 0)
    calls.clear()  # without the calls of trials
    for ours, expected in zip(results(model, inputs), theirs, strict=True):
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    # Albert's layers share one module. The mask of CLIP's texts is causal.
    assert len(calls) == SERVED.get(name, 0) + {"Albert": 1, "CLIP": -2}.get(name, 0)
    if "attention_mask" in inputs and name != "CLIP":
        assert set(calls) <= {(14, 11)}
    restore(model)
    assert all(map(torch.equal, results(model, inputs), theirs))


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_dtypes_of_an_encoder(name: str, calls: list[tuple[int, int]]) -> None:
    """At most twice as far from float32, with the same weights, as the model in bfloat16 was; masks of either kind."""
    model = model_of("Bert", attn_implementation=name).bfloat16()
    inputs = given(model)
    exact, theirs = (results(each, inputs)[0].float() for each in (copy.deepcopy(model).float(), model))
    accelerate(model)
    calls.clear()
    assert (results(model, inputs)[0].float() - exact).norm() <= 2 * (theirs - exact).norm()
    assert calls == [(14, 11)] * 2


def test_attention_masks() -> None:
    """The lengths that a mask leaves, or None if it is more than padding; a mask that is written in place is read
    again."""
    masks, key = Masks(), torch.zeros(2, 1, 3, 8)
    attended = torch.tensor([[1, 1, 1], [0, 1, 0]]).bool()[:, None, None].expand(2, 1, 4, 3).clone()
    additive = torch.where(attended, 0.0, torch.finfo(torch.float32).min)
    for mask in (attended, additive, attended[:, :, :1], torch.where(attended, 0.0, -torch.inf)):
        found = masks.keys(mask, key)
        assert found is not None
        assert found is masks.keys(mask, key)
        assert (found.rows.tolist(), found.starts.tolist()) == ([0, 1, 2, 4], [0, 3, 4])  # type: ignore[union-attr]
    for mask in (attended[1:], attended[1:, :, :1].clone()):  # a mask of all sequences
        assert masks.keys(mask, key).rows.tolist() == [1, 4]  # type: ignore[union-attr]
    for value in (0.5, -1.0, float("nan")):  # for one query, and for all
        for queries in (slice(0, 1), slice(None)):
            biased = additive.clone()
            biased[0, 0, queries, 1] = value
            assert masks.keys(biased, key) is None
    assert masks.keys(torch.ones(2, 1, 3, 3).tril().bool(), key) is None
    assert masks.keys(attended & torch.tensor([[True], [False]])[:, None, None], key) is None, "a text without keys"
    assert masks.keys(attended.expand(2, 4, 4, 3), key) is None, "one of each head"
    assert masks.keys(attended[:, 0], key) is None
    assert masks.keys(attended.long(), key) is None
    assert masks.keys(attended, torch.zeros(3, 1, 3, 8)) is None
    assert masks.keys(attended, key) is not None
    attended[0, 0, :, 2] = False
    assert masks.keys(attended, key).rows.tolist() == [0, 1, 4]  # type: ignore[union-attr]
    with torch.inference_mode():
        mask = attended.clone()
        assert masks.keys(mask, key).rows.tolist() == [0, 1, 4]  # type: ignore[union-attr]
        mask[0, 0, :, 2] = True
        assert masks.keys(mask, key).rows.tolist() == [0, 1, 2, 4]  # type: ignore[union-attr]
    found = masks.keys(None, key)
    assert found is not None
    assert (found.rows, found.starts.tolist()) == (None, [0, 3, 6])


def causal(model: Any, inputs: dict[str, Any]) -> Any:
    return model(**inputs | {"attention_mask": torch.ones(2, 1, 7, 7).tril()})


def in_training(model: Any, inputs: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    return model.train()(**inputs)


def with_gradients(model: Any, inputs: dict[str, Any]) -> Any:
    with torch.enable_grad():
        found = model(**inputs)
    assert found.last_hidden_state.requires_grad
    return found


def by_autocast(model: Any, inputs: dict[str, Any]) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(**inputs)


def as_a_decoder(model: Any, inputs: dict[str, Any]) -> Any:
    for layer in model.encoder.layer:
        layer.attention.self.is_causal = True
    return model(**inputs | {"attention_mask": None})


def with_weights(model: Any, inputs: dict[str, Any]) -> Any:
    model.set_attn_implementation("eager")
    found = model(**inputs, output_attentions=True)
    assert len(found.attentions) == 2
    return found


@pytest.mark.parametrize("call", [causal, in_training, with_gradients, by_autocast, as_a_decoder, with_weights])
@torch.no_grad()
def test_unsupported_attention_is_left_alone(call: Callable[..., Any], calls: list[tuple[int, int]]) -> None:
    model = model_of("Bert", attn_implementation="eager" if call is with_weights else "sdpa")
    theirs = call(copy.deepcopy(model), given(model)).last_hidden_state
    accelerate(model)
    calls.clear()
    ours = call(model, given(model)).last_hidden_state
    assert calls == []
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_report_says_why_an_attention_is_left_alone() -> None:
    """For a window and for relative biases; and the line of an attention that is served."""
    left = report(accelerate(model_of("ModernBert"))).left_alone
    why = "no op computes what it asks of its attention function"
    assert [name for name, said in left.items() if said == why] == ["layers.1.attn"]
    assert why in report(accelerate(model_of("T5Encoder"))).left_alone.values()
    model = accelerate(model_of("ViT"))
    name = next(entry.name for entry in report(model).entries if entry.op == encoders.EncoderAttention.op)
    model.get_submodule(name).is_causal = True
    assert report(model).left_alone[name] == "its is_causal is another since"
    flash = model_of("ViT")
    flash.config._attn_implementation = "flex_attention"
    assert "its attention is flex_attention" in report(accelerate(flash)).left_alone.values()


@pytest.mark.slow
def test_compiled_encoder() -> None:
    """One graph."""
    torch.compiler.reset()
    model = model_of("ViT")
    inputs = given(model)
    theirs = results(model, inputs)
    compiled = torch.compile(accelerate(model), fullgraph=True, backend="aot_eager")
    for ours, expected in zip(results(compiled, inputs), theirs, strict=True):
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ViT", "Bert", "SiglipVision", "Whisper"])
def test_encoder_on_a_gpu(name: str, calls: list[tuple[int, int]]) -> None:
    """At most twice as far from float32, with the same weights, as the model in bfloat16 was."""
    model = model_of(name).bfloat16().cuda()
    inputs = {key: value.cuda() for key, value in given(model).items()}
    halves = {key: value.bfloat16() if value.is_floating_point() else value for key, value in inputs.items()}
    exact, theirs = results(copy.deepcopy(model).float(), inputs), results(model, halves)
    accelerate(model)
    calls.clear()
    for ours, before, expected in zip(results(model, halves), theirs, exact, strict=True):
        assert (ours.float() - expected).norm() <= 2 * (before.float() - expected).norm()
    assert len(calls) == SERVED[name]


def test_encoder_of_another_dtype() -> None:
    model = transformers.ViTModel(transformers.ViTConfig(**IMAGE)).double()
    with pytest.raises(ModelError, match=r"found torch\.float64$"):
        accelerate(model)


class ByDimensions(nn.LayerNorm):
    """A norm that treats images in another way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return 2 * found if x.ndim == 4 else found


def test_norm_that_depends_on_dimensions() -> None:
    norm = ByDimensions(64)
    found = norms.Norm(norm, torch.float32, Trials())
    for shape in ((5, 64), (2, 5, 64), (2, 3, 5, 64), (2, 2, 3, 5, 64)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            torch.testing.assert_close(found.forward(x), norm(x), rtol=1e-5, atol=1e-5)
    norm.register_buffer("factor", torch.ones(1))
    with pytest.raises(Unknown, match="no op reads its factor"):
        norms.Norm(norm, torch.float32, Trials())
