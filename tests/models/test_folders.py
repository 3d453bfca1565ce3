"""Model folders: the files that are read, and bad files that are refused before memory is allocated."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from pyops import ModelError
from pyops.models import Config, Decoder, Rope, checkpoint, load
from pyops.models.runner import Part, Runner
from tests.support.small_models import LINEAR, LLAMA3, PROMPTS, SIZES, YARN, folders, reference


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case, saved once."""
    return folders(tmp_path_factory)


def test_sharded_folder(tmp_path: Path) -> None:
    """Also with an explicit dtype, and with the progress of the load."""
    reference("qwen3").save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    steps: list[tuple[int, int]] = []
    model = load(tmp_path, dtype="bfloat16", progress=lambda *step: steps.append(step))
    for name, tensor in reference("qwen3").state_dict().items():
        assert torch.equal(model.tensors()[name], tensor.bfloat16()), name
    total = sum(tensor.nbytes for tensor in model.tensors().values())
    assert steps[-1] == (total, total)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = sorted(folder.glob("*.safetensors"))[0]
        tensors = safetensors.torch.load_file(file)
        change(tensors)
        safetensors.torch.save_file(tensors, file)

    return edit


def edit_index(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "shard.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(changes))

    return edit


def repeat_tensor(folder: Path) -> None:
    """A second shard repeats a tensor of the first one with other values."""
    edit_index(weight_map={"model.norm.weight": "shard.safetensors", "lm_head.weight": "twice.safetensors"})(folder)
    safetensors.torch.save_file({"model.norm.weight": torch.zeros(64)}, folder / "twice.safetensors")


def rope(**values: Any) -> Callable[[Path], None]:
    return edit_config(rope_parameters=values)


def shorten(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-8])


BAD = {
    "no config": (lambda folder: (folder / "config.json").unlink(), r"config\.json: is missing"),
    "a broken config": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: cannot be read"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "expected an object, got list"),
    "an architecture": (
        edit_config(architectures=["GPT2LMHeadModel"]),
        r"architectures: expected Llama.*, got \['GPT2",
    ),
    "no architecture": (edit_config(architectures=None), "architectures: expected"),
    "an activation": (edit_config(hidden_act="relu"), "hidden_act: expected 'silu' or .*, got 'relu'"),
    "quantised": (
        edit_config(quantization_config={"bits": 4}),
        "quantization_config.quant_method: expected 'fp8', .* or 'compressed-tensors', got None",
    ),
    "a rope": (rope(rope_type="longrope"), "rope_type: expected .*, got 'longrope'"),
    "a rope of another type": (rope(rope_type=[]), r"rope_type: expected .*, got \[\]"),
    "no rope at all": (edit_config(rope_scaling=[1]), r"rope_scaling: expected one object for all layers, got \[1\]"),
    "no length of texts": (
        rope(**YARN | {"original_max_position_embeddings": 10**30}),
        "original_max_position_embeddings: expected a positive integer up to 2147483647, got 1000",
    ),
    "an endless factor": (rope(**YARN | {"factor": float("inf")}), r"rope_parameters\.factor: .*, got inf"),
    "a factor of 400 digits": (rope(**YARN | {"factor": 10**400}), r"rope_parameters\.factor: .*, got 1000"),
    "scales that end nothing": (rope(**YARN | {"mscale": -1, "mscale_all_dim": 1}), r"rope_parameters\.mscale: "),
    "a ramp of words": (rope(**YARN | {"beta_fast": "32"}), r"rope_parameters\.beta_fast: .*, got '32'"),
    "an attention factor of 0": (rope(**YARN | {"attention_factor": 0}), r"attention_factor: .*, got 0"),
    "truncate as a word": (rope(**YARN | {"truncate": "false"}), "truncate: expected true or false, got 'false'"),
    "a theta of 1": (rope(**YARN | {"rope_theta": 1}), r"rope_theta: expected more than 1, got 1\.0"),
    "a theta of 0": (rope(rope_theta=0), "rope_theta: expected a positive number from 1e-30 to 1e30, got 0"),
    "a rope without factor": (
        edit_config(rope_parameters={"rope_type": "linear"}),
        r"rope_parameters\.factor: expected",
    ),
    "a theta": (
        edit_config(rope_parameters={"rope_theta": "big"}),
        "rope_theta: expected a positive number .*, got 'big'",
    ),
    "factors in disorder": (
        edit_config(rope_parameters=LLAMA3 | {"high_freq_factor": 1.0}),
        r"high_freq_factor: expected more than low_freq_factor, got 1\.0",
    ),
    "an epsilon": (edit_config(rms_norm_eps=None), "rms_norm_eps: expected a positive number .*, got None"),
    "part of a head": (
        edit_config(rope_parameters={"partial_rotary_factor": 0.5}),
        "partial_rotary_factor: expected 1.0",
    ),
    "an endless epsilon": (edit_config(rms_norm_eps=float("inf")), "rms_norm_eps: expected a .* number .*, got inf"),
    "an epsilon of 400 digits": (edit_config(rms_norm_eps=10**400), "rms_norm_eps: expected a .* number .*, got 1000"),
    "no size": (edit_config(hidden_size=None), "hidden_size: expected a positive integer .*, got None"),
    "a size": (edit_config(num_hidden_layers="2"), "num_hidden_layers: expected a positive integer .*, got '2'"),
    **{
        f"{name} beyond all": (edit_config(**{name: 10**30}), f"{name}: expected a positive integer up to .*, got 10")
        for name in SIZES
        if name.endswith(("_size", "_heads", "_layers", "_embeddings"))
    },
    "a vocabulary beyond all": (
        edit_config(vocab_size=10**19),
        "vocab_size: expected a positive integer up to 1048576",
    ),
    "heads beyond all": (edit_config(head_dim=10**30), "head_dim: expected a positive integer up to 1048576, got 10"),
    "queries beyond all": (
        edit_config(num_attention_heads=2**20),
        r"num_attention_heads \* head_dim: expected a positive integer up to 1048576",
    ),
    "layers beyond the tensors": (edit_config(num_hidden_layers=15000), "has 15000 layers, and 21 tensors for them"),
    **{
        f"architectures {value!r}": (edit_config(architectures=value), "architectures: expected Llama")
        for value in (5, 1.5, True, {"a": 1}, [["LlamaForCausalLM"]], "LlamaForCausalLM")
    },
    "windows of a Llama": (
        edit_config(layer_types=["sliding_attention"] * 2, sliding_window=4),
        r"layer_types: expected 2 of full_attention, got \['sliding",
    ),
    **{
        f"{name} {value!r}": (edit_config(**{name: value}), f"{name}: expected true or false, got ")
        for name, value in (("tie_word_embeddings", "false"), ("attention_bias", 1), ("mlp_bias", []))
    },
    **{
        f"eos_token_id {value!r}": (edit_config(eos_token_id=value), "eos_token_id: expected a token or several, got ")
        for value in ("35", ["35"], {}, -1, [True], 1.5)
    },
    "a deep config": (
        lambda folder: (folder / "config.json").write_text('{"a":' * sys.getrecursionlimit() * 10),
        r"config\.json: cannot be read: ",
    ),
    "a deep generation config": (
        lambda folder: (folder / "generation_config.json").write_text("[" * sys.getrecursionlimit() * 10),
        r"generation_config\.json: cannot be read: ",
    ),
    "heads": (
        edit_config(num_key_value_heads=3),
        "num_key_value_heads: expected a divisor of num_attention_heads=4, got 3",
    ),
    "a dtype": (edit_config(dtype="int8"), "dtype: expected float32 or .*, got 'int8'"),
    "a missing layer": (
        edit_config(num_hidden_layers=3),
        r"model\.layers\.2\.input_.*: is in no shard, nor are 8 others",
    ),
    "one layer more": (edit_config(num_hidden_layers=1), r"model\.layers\.1\..*: is no tensor of this architecture"),
    "a bias": (
        edit_tensors(lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})),
        r"q_proj\.bias: is no tensor of this architecture",
    ),
    "a shape": (edit_config(intermediate_size=100), r"mlp\..*: expected shape .*100.*, got .*96"),
    "a tensor's dtype": (
        edit_tensors(lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)})),
        r"model\.norm\.weight: expected BF16 or F16 or F32, got I8",
    ),
    "a missing tensor": (
        edit_tensors(lambda tensors: tensors.pop("lm_head.weight")),
        r"lm_head\.weight: is in no shard$",
    ),
    "a cut shard": (shorten, r"model\.safetensors: is no whole safetensors file"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors: is missing"),
    "a missing shard": (edit_index(weight_map={"lm_head.weight": "absent.safetensors"}), "absent.*: is missing"),
    "a tensor in two shards": (
        repeat_tensor,
        r"twice\.safetensors: model\.norm\.weight: is in shard\.safetensors, too",
    ),
    "a tensor under two names": (
        edit_tensors(lambda tensors: tensors.update({"language_model.model.norm.weight": torch.zeros(64)})),
        r"norm\.weight: is there under the name (language_model\.)?model\.norm\.weight, too",
    ),
    "an index that leads away": (
        edit_index(weight_map={"lm_head.weight": "../model.safetensors"}),
        "weight_map: expected",
    ),
    "an index of nothing": (edit_index(metadata={}), "weight_map: expected"),
    "an index of lists": (edit_index(weight_map={"a": ["b"]}), "weight_map: expected"),
    "an index without letters": (edit_index(weight_map={"a": "x\0y"}), "is missing"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_folder_is_refused_before_allocation(
    what: str, folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder("llama"), tmp_path / "bad")
    damage, message = BAD[what]
    damage(tmp_path / "bad")

    def no_memory(config: Config, dtype: str | None, device: str) -> Decoder:
        assert device == "meta", "memory is taken"
        return Decoder(config, dtype, device)

    monkeypatch.setattr(checkpoint, "Decoder", no_memory)
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "bad")


def test_old_spellings_and_defaults() -> None:
    """As in the folders of Llama 3.1 and Mistral 0.1."""
    sizes = {name: SIZES[name] for name in SIZES if isinstance(SIZES[name], int)}
    new = Config.parse({"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **sizes, "rope_parameters": LLAMA3})
    scaling = {"type" if name == "rope_type" else name: LLAMA3[name] for name in LLAMA3 if name != "rope_theta"}
    old = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "rope_theta": 1e4, "rope_scaling": scaling}
    assert Config.parse(old | sizes) == new
    assert new.rope == Rope(1e4, "llama3", 4.0, 1.0, 4.0, 32)
    first = {"architectures": ["MistralForCausalLM"], "rope_theta": 1e6, "rope_scaling": None, "eos_token_id": [2, 7]}
    mistral = Config.parse(first | sizes)
    assert (mistral.rope, mistral.sliding_windows, mistral.eos_token_ids) == (Rope(1e6), (4096, 4096), (2, 7))
    qwen = {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    }
    assert Config.parse(qwen | sizes).sliding_windows == (0, 7)
    assert Config.parse(qwen | sizes | {"use_sliding_window": False}).sliding_windows == (0, 0)
    with pytest.raises(ModelError, match="layer_types: expected 2 of full_attention, got"):
        Config.parse(qwen | sizes | {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2})
    del sizes["num_key_value_heads"]
    assert Config.parse(old | sizes).num_key_value_heads == 4
    assert Config.parse(first | sizes | {"num_attention_heads": 16}).num_key_value_heads == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}, "original_max_position_embeddings": 32},
        {"rope_parameters": YARN, "original_max_position_embeddings": 32},
        {"rope_parameters": LINEAR, "rope_scaling": YARN, "rope_theta": 50.0},
        {"rope_parameters": LINEAR, "rope_scaling": {}, "rope_theta": 50.0},
        {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 50.0},
        {"rope_scaling": {"type": "linear", "rope_type": "llama3"} | LLAMA3},
    ],
    ids=str,
)
def test_duplicate_settings_are_read_as_in_transformers(
    changes: dict[str, Any], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    values = json.loads((folder("llama") / "config.json").read_text())
    del values["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.LlamaConfig.from_pretrained(tmp_path)
    )
    is_second = bool(changes.get("rope_scaling")) and "rope_parameters" in changes
    with pytest.warns(match="not read: rope_parameters$") if is_second else nullcontext():
        ours = Config.read(tmp_path).rope
    torch.testing.assert_close(ours.frequencies(16), theirs.inv_freq, rtol=2**-21, atol=0.0)
    assert ours.attention_factor == theirs.attention_scaling


@pytest.mark.parametrize("same", [False, True])
def test_tied_embeddings_with_a_separate_head(same: bool, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The head in the file is used, as by transformers, whatever the config says."""
    shutil.copytree(folder("llama"), tmp_path / "tied")
    edit_config(tie_word_embeddings=True)(tmp_path / "tied")
    if same:
        embedding = reference("llama").model.embed_tokens.weight.clone()
        edit_tensors(lambda tensors: tensors.update({"lm_head.weight": embedding}))(tmp_path / "tied")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "tied").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPTS[0]])).logits[0, -1:]
    found = Runner(load(tmp_path / "tied"), 8, 16, 2, 64).run([Part(PROMPTS[0], 0, [1, 2])])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_single_file_precedes_an_index(folder: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(folder("llama"), tmp_path / "both")
    edit_index(weight_map={"lm_head.weight": "shard.safetensors"})(tmp_path / "both")
    edit_tensors(lambda tensors: tensors["lm_head.weight"].zero_())(tmp_path / "both")
    shutil.copy(folder("llama") / "model.safetensors", tmp_path / "both")
    assert torch.equal(load(tmp_path / "both").head.weight, reference("llama").lm_head.weight)


WINDOWS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"Mistral: {value!r}": ({"sliding_window": value}, "sliding_window: expected a positive integer")
        for value in ("", [], True, 0, 4.5, 10**30)
    },
    "Ministral: layers": ({"layer_types": ["other"] * 2}, "expected 2 of full_attention or sliding_attention"),
    "Mistral: layers": ({"layer_types": ["full_attention"] * 2}, "layer_types: expected 2 of sliding_attention"),
    **{
        f"Qwen2: {value!r}": ({"layer_types": value}, "layer_types: expected 2 of full_attention or sliding_attention")
        for value in (5, True, [], [[1], [2]], "ab")
    },
    "Qwen2: a flag": ({"use_sliding_window": "false"}, "use_sliding_window: expected true or false, got 'false'"),
    "Qwen2: first": ({"max_window_layers": True}, "max_window_layers: expected an integer, got True"),
}


@pytest.mark.parametrize("what", WINDOWS)
def test_bad_windows_are_refused(what: str) -> None:
    changes, message = WINDOWS[what]
    sizes = {name: SIZES[name] for name in SIZES if isinstance(SIZES[name], int)}
    values = {"architectures": [f"{what.partition(':')[0]}ForCausalLM"], "use_sliding_window": True, **sizes}
    with pytest.raises(ModelError, match=message):
        Config.parse(values | changes)


def test_weights_that_do_not_fit_are_refused(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 << 20 < checkpoint.free_bytes(torch.device("cpu")) < 1 << 50
    monkeypatch.setattr(checkpoint, "free_bytes", lambda device: 1000)
    with pytest.raises(ModelError, match=r"its weights take .* GB, and cpu has 0\.0 GB"):
        load(folder("llama"))


@pytest.mark.parametrize("device", ["bogus", "", "meta", "mps", "cuda:99", "cuda:-1", 1.5])
def test_missing_devices_are_refused(device: Any, folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=f"device: expected the CPU or one of . GPUs, got '{device}'"):
        load(folder("llama"), device)


def test_eos_tokens_come_from_the_generation_config(folder: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(folder("llama") / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert Config.read(tmp_path).eos_token_ids == (5, 6)
