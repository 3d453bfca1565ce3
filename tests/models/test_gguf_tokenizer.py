"""Tokenizers in GGUF files: tokens of `sentencepiece`, pre-tokenizers of families, EOS tokens."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pyops import ModelError
from pyops.models import Config
from pyops.models.gguf_file import GgufFile
from pyops.models.gguf_tokenizer import _PATTERNS, tokenizer_of
from tests.models.test_gguf import TEXT, trained, vocabulary
from tests.models.test_gguf_metadata import written

sentencepiece = pytest.importorskip("sentencepiece")
tokenizers = pytest.importorskip("tokenizers")

AT, SPACE = "tokenizer.ggml", "\u2581"
LINES = (TEXT.replace("<|end|>", "") + "    indented  twice\n a b\tc " * 3).split("\n")
TEXTS = (
    "a",
    " a",
    "  a",
    "   the end",
    " ",
    "  ",
    "a  b   c ",
    "",
    "\n a",
    "it's 12345",
    "東京 über",
    "\u2581a",
    "<s> a",
)


@cache
def pieces(**options: Any) -> tuple[Any, dict[str, Any]]:
    """(a processor of `sentencepiece`, the metadata of its model)."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20),
        model_writer=model,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    found = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    numbers = range(found.get_piece_size())
    kinds = ((found.is_unknown, 2), (found.is_control, 3), (found.is_unused, 5), (found.is_byte, 6))
    return found, {
        f"{AT}.model": "llama",
        f"{AT}.tokens": [found.id_to_piece(i) for i in numbers],
        f"{AT}.scores": [found.get_score(i) for i in numbers],
        f"{AT}.token_type": [next((kind for has, kind in kinds if has(i)), 1) for i in numbers],
        f"{AT}.unknown_token_id": found.unk_id(),
        f"{AT}.bos_token_id": found.bos_id(),
        f"{AT}.eos_token_id": found.eos_id(),
    }


@pytest.mark.parametrize("has_prefix", [True, False])
def test_tokens_match_sentencepiece(has_prefix: bool, tmp_path: Path) -> None:
    """The leading space is added to texts that begin with spaces, too; decoding gives the text back."""
    theirs, values = pieces(add_dummy_prefix=has_prefix)
    values = values | {f"{AT}.add_space_prefix": has_prefix}
    ours = tokenizer_of(GgufFile(written(tmp_path / "model.gguf", values)))
    for text in (*LINES, *TEXTS[:-1]):
        tokens = ours.encode(text).ids
        assert tokens == [theirs.bos_id(), *theirs.encode(text)], text
        assert ours.decode(tokens) == text.replace(SPACE, " "), text


def test_text_after_a_special_token_has_a_leading_space(tmp_path: Path) -> None:
    """As in llama.cpp, and as the messages of a chat are encoded one by one."""
    theirs, values = pieces()
    ours = tokenizer_of(GgufFile(written(tmp_path / "model.gguf", values)))
    parts, ends = ["a", " b c", "the"], [theirs.eos_id()]
    expected = [token for part in parts for token in theirs.encode(part) + ends]
    assert ours.encode("</s>".join([*parts, ""])).ids == [theirs.bos_id(), *expected]


# Pre-tokenizers of byte-level vocabularies


def byte_level(pre: str, **more: Any) -> dict[str, Any]:
    tokens, merges = vocabulary(trained(True))
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": merges,
        "token_type": [3] + [1] * len(tokens[1:]),
    }
    return {f"{AT}.{name}": value for name, value in (values | more).items()}


WORDS = "HelloWorld it's 12345 (x) a/b?/\n\n  e\u0301a DON'T \u4eac\u90fd3\u304b\u306a, [tag]-x  \r\n end  "
HAN = "\u4eac\u90fd"
LETTERS = f"HelloWorld| it|'s| |123|45| (|x|)| a|/b|?/\n\n| | e|\u0301a| DON|'T| {HAN}|3|\u304b\u306a|,| [|tag|]-|x|"
LETTERS += "  \r\n| end|  "
CASED = LETTERS.replace("HelloWorld", "Hello|World").replace("e|\u0301a", "e\u0301a")
CODER = (
    f"HelloWorld| it|'|s| |1|2|3|4|5| (|x|)| a|/|b|?/|\n|\n| | e|\u0301|a| DON|'|T| |{HAN}|3|\u304b\u306a|,| [|tag|]-|x"
)
CODER += "|  |\r|\n| end|  "
# {name of a pre-tokenizer: pieces of `WORDS`}, written by hand from the definitions of the families' tokenizers.
CUTS = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral"), LETTERS),
    "stablelm2": LETTERS.replace("123|45", "1|2|3|4|5"),
    "tekken": CASED.replace("123|45", "1|2|3|4|5"),
    "kimi-k2": CASED.replace("|'", "'").replace(f" {HAN}", f" |{HAN}"),
    "deepseek-v3": LETTERS.replace("e|\u0301a", "e\u0301a").replace(f" {HAN}", f" |{HAN}"),
    "deepseek-coder": CODER,
    "deepseek-llm": CODER,
}


@pytest.mark.parametrize("pre", CUTS)
def test_words_are_split_as_the_family_defines(pre: str, tmp_path: Path) -> None:
    """Decoding gives the text back; a word that is a token stays whole where the family ignores merges."""
    ours = tokenizer_of(GgufFile(written(tmp_path / "model.gguf", byte_level(pre))))
    cuts = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    assert [word for word, _ in tokenizers.pre_tokenizers.Sequence(cuts).pre_tokenize_str(WORDS)] == CUTS[pre].split(
        "|"
    )
    assert ours.decode(ours.encode(WORDS).ids) == WORDS
    whole = written(tmp_path / "whole.gguf", byte_level(pre, merges=[]))
    word = next(
        token for token in vocabulary(trained(True))[0] if token.isalpha() and token.isascii() and len(token) > 2
    )
    is_whole = pre in ("llama3", "llama-v3", "falcon3", "pixtral", "tekken")
    assert (len(tokenizer_of(GgufFile(whole)).encode(word).ids) == 1) == is_whole


@pytest.mark.parametrize(
    ("pre", "begins"), [("tekken", True), ("falcon3", True), ("deepseek-v3", False), ("kimi-k2", False)]
)
def test_bos_token_is_added_where_the_family_wants_it(pre: str, begins: bool, tmp_path: Path) -> None:
    """Unless the file says otherwise."""
    for said in (None, True, False):
        values = byte_level(pre, bos_token_id=0, add_bos_token=said)
        ours = tokenizer_of(GgufFile(written(tmp_path / f"{said}.gguf", values)))
        assert (ours.encode("a").ids[0] == 0) == (begins if said is None else said)


def test_file_that_appends_an_eos_token_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", byte_level("llama3", add_eos_token=True))
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.add_eos_token: expected false, got true"):
        tokenizer_of(GgufFile(path))


# EOS tokens


@pytest.mark.parametrize(
    ("texts", "kind", "ends"),
    [
        (["<|eot_id|>", "<|eom_id|>"], 3, (2, 3, 4)),
        (["<|im_end|>"], 3, (2, 3)),
        (["<end_of_turn>"], 4, (2, 3)),  # in early files of Gemma
        (["<|end|>"], 3, (2, 3)),
        (["<|return|>", "<|call|>", "<|end|>"], 3, (2, 3, 4)),  # gpt-oss: the end of a message does not end a turn
        (["<|im_end|>", "x"], 1, (2,)),  # an ordinary word
    ],
)
def test_tokens_that_end_a_turn(texts: list[str], kind: int, ends: tuple[int, ...], tmp_path: Path) -> None:
    """In addition to those that the file names."""
    tokens = ["<unk>", "<s>", "</s>", *texts]
    values = {"model": "llama", "tokens": tokens, "token_type": [2, 3, 3] + [kind] * len(texts), "eos_token_id": 2}
    path = written(tmp_path / "model.gguf", {f"{AT}.{name}": value for name, value in values.items()})
    assert Config.read(path).eos_token_ids == ends
