"""The tokenizer in the metadata of a GGUF file, as a `tokenizers.Tokenizer`."""

from __future__ import annotations

from typing import Any

from .._core.lazy import optional
from .._model_error import ModelError
from .gguf_file import GgufFile

_AT = "tokenizer.ggml"
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that are found in a text before it is cut
_NORMAL = 1
_SPACE = "\u2581"  # SentencePiece's

# What the merges of a byte-level vocabulary were learned within, by the file's name for it (``tokenizer.ggml.pre``).
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = (f"{_LETTERS}{digits}{_OTHERS}" for digits in (r"\p{N}{1,3}", r"\p{N}"))
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{word}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
)
_O200K = rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS = r"\p{N}"  # each of which is cut off before GPT-2's words are
_PATTERNS = {
    **dict.fromkeys(("llama-bpe", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "gpt-4o": _O200K,
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm"), _DIGITS),
    **dict.fromkeys(("gpt-2", "olmo", "default"), None),
}


def tokenizer_of(file: GgufFile) -> Any:
    """The tokenizer: byte-level BPE (``gpt2``), or SentencePiece's BPE (``llama``).

    A text begins with the file's first token (``bos_token_id``) if ``add_bos_token`` says so, or says nothing where
    Llamas want it.

    Raises:
        ModelError: the file has none, one of another kind, or one whose cuts are not known.
    """
    optional("tokenizers", "text", "models")
    try:
        return _tokenizer(file)
    except ModelError:
        raise
    except Exception as error:  # `tokenizers` raises no class of its own
        raise ModelError(file.path, f"has no whole tokenizer: {error}") from None


def _tokenizer(file: GgufFile) -> Any:
    tokenizers = optional("tokenizers", "text", "models")
    kind, tokens = file.value(f"{_AT}.model"), file.value(f"{_AT}.tokens")
    if kind not in ("gpt2", "llama") or not tokens:
        raise ModelError(file.path, f"{_AT}.model: expected 'gpt2' or 'llama' and its tokens, got {kind!r}")
    types = file.value(f"{_AT}.token_type") or [_NORMAL] * len(tokens)
    tokenizer = _byte_level(file, tokens) if kind == "gpt2" else _sentence_piece(file, tokens, types)
    for wanted, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        found = [token for token, own in zip(tokens, types, strict=True) if own == wanted]
        add([tokenizers.AddedToken(token, normalized=False, special=wanted == _CONTROL) for token in found])
    bos = file.value(f"{_AT}.bos_token_id")
    is_llama = kind == "llama" or file.value(f"{_AT}.pre") == "llama-bpe"
    if bos is not None and file.value(f"{_AT}.add_bos_token", is_llama):
        first = tokens[bos]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=[first, "$A"], pair=[first, "$A", "$B"], special_tokens=[(first, bos)]
        )
    return tokenizer


def _byte_level(file: GgufFile, tokens: list[str]) -> Any:
    tokenizers = optional("tokenizers", "text", "models")
    pre = file.value(f"{_AT}.pre", "default")
    if pre not in _PATTERNS:
        raise ModelError(file.path, f"{_AT}.pre: expected {' or '.join(map(repr, _PATTERNS))}, got {pre!r}")
    merges = [tuple(merge.split(" ", 1)) for merge in file.value(f"{_AT}.merges") or []]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = tokenizers.models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe")
    tokenizer, cut = tokenizers.Tokenizer(model), tokenizers.pre_tokenizers
    pattern = _PATTERNS[pre]
    if pattern is None:
        tokenizer.pre_tokenizer = cut.ByteLevel(add_prefix_space=False)
    else:
        words, has_words = cut.Split(tokenizers.Regex(pattern), "isolated"), pattern != _DIGITS
        tokenizer.pre_tokenizer = cut.Sequence([words, cut.ByteLevel(add_prefix_space=False, use_regex=not has_words)])
    if pattern == _QWEN2:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GgufFile, tokens: list[str], types: list[int]) -> Any:
    """The best-scored pair of neighbours is merged first. Characters that are no tokens become tokens of bytes."""
    tokenizers = optional("tokenizers", "text", "models")
    scores = file.value(f"{_AT}.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(file.path, f"{_AT}.scores: expected a number for each of {len(tokens)} tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pieces = {token for token, own in zip(tokens, types, strict=True) if own == _NORMAL}
    merges = []
    for token in pieces:
        for at in range(1, len(token)):
            if token[:at] in pieces and token[at:] in pieces:
                merges.append((-scores[vocabulary[token]], vocabulary[token], at, token))
    pairs = [(token[:at], token[at:]) for _, _, at, token in sorted(merges)]
    unknown = file.value(f"{_AT}.unknown_token_id", 0)
    model = tokenizers.models.BPE(vocabulary, pairs, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    tokenizer, decode = tokenizers.Tokenizer(model), tokenizers.decoders
    prefix = file.value(f"{_AT}.add_space_prefix", True)
    scheme = "first" if prefix else "never"
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decode.Replace(_SPACE, " "), decode.ByteFallback(), decode.Fuse()]
    tokenizer.decoder = decode.Sequence([*steps, decode.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer
