"""The command `generate`: streamed text, refusals, and tokens that are single bytes."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers

from pyops import ModelError
from pyops.__main__ import main
from pyops.cli import generate
from pyops.models.config import ARCHITECTURES
from tests.support.small_models import PROMPTS, folders, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case, saved once."""
    return folders(tmp_path_factory)


@pytest.fixture
def words(folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """The folder of a model with a tokenizer, in which token i is the word wi."""
    shutil.copytree(folder("llama"), tmp_path / "words")
    vocabulary = {f"w{i}": i for i in range(160)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words" / "tokenizer.json"))
    return tmp_path / "words"


def sentence(tokens: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def test_generate_prints_text(words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = PROMPTS[0], PROMPTS[2]
    options = ["--model", str(words), "--max-tokens", "12", "--device", "cpu"]
    assert main(["generate", *options, "--prompt", sentence(first)]) == 0
    printed = capsys.readouterr()
    assert printed.out == sentence([*first, *text("llama", tuple(first), 12)]) + "\n"
    assert "12 tokens, the first after " in printed.err
    assert main(["generate", *options, "--prompt", sentence(first), "--prompt", sentence(last)]) == 0
    expected = [sentence([*prompt, *text("llama", tuple(prompt), 12)]) for prompt in (first, last)]
    printed = capsys.readouterr()
    assert printed.out.splitlines() == expected
    assert "24 tokens" in printed.err


def test_help_names_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    said = " ".join(capsys.readouterr().out.split()).partition("Families: ")[2].partition(".")[0].split(", ")
    expected = {name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration") for name in ARCHITECTURES}
    assert said == sorted(expected, key=str.lower)


def test_generate_names_mistakes(words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["generate", "--model", str(words), "--prompt", "w1", "--device", "cpu"]
    assert main([*options, "--top-p", "0"]) == 2
    assert capsys.readouterr().err.startswith("SamplingParams: top_p: expected a number, more than 0")
    assert main([*options, "--max-tokens", "1000"]) == 2
    assert "prompt and max_tokens: expected at most max_seq_len=256 tokens, got 1001" in capsys.readouterr().err
    assert main([*options, "--prompt", ""]) == 2
    assert "request: prompt: expected tokens from 0 to 159, got none" in capsys.readouterr().err
    assert main([*options, "--prompt", "w1 \udcff"]) == 2
    assert capsys.readouterr().err == "prompt: expected UTF-8, got 'w1 \\udcff'\n"
    assert main([*options, "--device", "bogus"]) == 2
    assert capsys.readouterr().err.startswith("device: expected the CPU or one of")
    assert main([*options, "--dtype", "int4"]) == 2
    assert capsys.readouterr().err.startswith("dtype: expected float32 or float16 or bfloat16, got 'int4'")
    (words / "tokenizer.json").write_text("no")
    assert main(options) == 2
    assert "tokenizer.json: is no tokenizer: " in capsys.readouterr().err
    (words / "tokenizer.json").unlink()
    assert main(options) == 2
    assert "tokenizer.json: is missing" in capsys.readouterr().err


def test_prompts_are_checked_before_weights_are_read(
    words: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "load", lambda *args: pytest.fail("weights are read"))
    for prompt, count in (("", "1"), ("w1", "256"), (sentence(range(100)) + " w1" * 157, "1")):
        assert main(["generate", "--model", str(words), "--prompt", prompt, "--max-tokens", count]) == 2
        assert capsys.readouterr().err.startswith("request: prompt")


def test_prompts_are_neither_truncated_nor_padded(words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(words / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=30, pad_id=7, pad_token="w7")
    tokenizer.save(str(words / "tokenizer.json"))
    options = ["--model", str(words), "--max-tokens", "12", "--device", "cpu"]
    assert main(["generate", *options, "--prompt", sentence(PROMPTS[0])]) == 0
    assert capsys.readouterr().out == sentence([*PROMPTS[0], *text("llama", tuple(PROMPTS[0]), 12)]) + "\n"


@cache
def byte_fallback() -> tokenizers.Tokenizer:
    """A tokenizer like that of Llama 2: characters without a token are written byte by byte."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b"]
    vocabulary = {word: i for i, word in enumerate(words)}
    found = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    found.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found.add_special_tokens(words[:3])
    return found


def stream(prompt: Sequence[str | int], text: Sequence[str | int]) -> list[str]:
    """The text that each token adds; tokens are words, or bytes of characters without a word."""
    tokenizer = byte_fallback()
    prompt, tokens = (
        [tokenizer.token_to_id(one if isinstance(one, str) else f"<0x{one:02X}>") for one in words]
        for words in (prompt, text)
    )
    adding = generate.Stream(tokenizer, prompt)
    return [adding.add(token, last=i == len(tokens) - 1) for i, token in enumerate(tokens)]


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        ([0x0A, 0xF0, "a", "b"], ["\n", "", "�a", "b"]),
        (["a", 0x0A, 0xF0, 0x9F, "a"], ["a", "\n", "", "", "��a"]),
        ([*"😀".encode(), "a"], ["", "", "", "😀", "a"]),
        ([*"é".encode(), "▁a", "</s>"], ["", "é", " a", ""]),
        (["a", 0xF0], ["a", "�"]),
        ([0xF0, "</s>"], ["", "�"]),
        ([*"�".encode(), "a"], ["", "", "", "�a"]),
    ],
    ids=str,
)
def test_bytes_are_shown_once_they_are_text(tokens: list[str | int], pieces: list[str]) -> None:
    assert stream(["<s>", "▁a"], tokens) == pieces


def test_pieces_add_up_to_the_text() -> None:
    """With every prefix of one text as a prompt; invalid bytes do not end the stream."""
    words = "a é▁b漢 😀.\n ▁ab"
    ids = byte_fallback().encode(words).ids
    for end in range(1, len(words)):
        prompt = byte_fallback().encode(words[:end]).ids
        adding = generate.Stream(byte_fallback(), prompt)
        assert ids[: len(prompt)] == prompt
        pieces = [adding.add(token, last=i == len(ids) - 1) for i, token in enumerate(ids[len(prompt) :], len(prompt))]
        assert byte_fallback().decode(prompt) + "".join(pieces) == byte_fallback().decode(ids)
    generator = random.Random(0)
    for _ in range(200):
        tokens = [generator.randrange(264) for _ in range(20)]
        adding = generate.Stream(byte_fallback(), tokens[:2])
        for i, token in enumerate(tokens[2:], 2):
            adding.add(token, last=i == 19)


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], {})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines].count("0") == 8
    assert [line[0] for line in lines].count("1") == 4


def test_hub_model_is_downloaded_or_the_error_says_how(monkeypatch: pytest.MonkeyPatch, words: Path) -> None:
    asked = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        if name == "owner/absent":
            raise OSError("404")
        return str(words)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert generate.downloaded(str(words)) == str(words)
    assert generate.downloaded("no folder") == "no folder"
    assert generate.downloaded("owner/model") == str(words)
    with pytest.raises(ModelError, match="owner/absent: is no folder and no file, and cannot be downloaded: 404"):
        generate.downloaded("owner/absent")
    assert asked == ["owner/model", "owner/absent"]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match="pip install huggingface_hub"):
        generate.downloaded("owner/model")
