"""The tokenizer in the metadata of a GGUF file, as a `tokenizers.Tokenizer`."""

from __future__ import annotations

from typing import Any

from .._core.system.lazy import optional
from ..errors import ModelError
from .gguf_file import CONTROL, USER_DEFINED, GgufFile

_AT = "tokenizer.ggml"
_NORMAL = 1
_SPACE = "\u2581"  # SentencePiece writes a space so

# Regular expressions of the pre-tokenizers of byte-level BPE, by ``tokenizer.ggml.pre``. Each expression splits the
# pieces that the previous expressions left; the text between two matches is a piece, too.
_DIGIT, _DIGITS, _SPACES = r"\p{N}", r"\p{N}{1,3}", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = (
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    for digits in (_DIGITS, _DIGIT)
)


def _cased(suffix: str, digits: str, ends: str, besides: str = "") -> str:
    """An expression for words that end before an upper-case letter, none from `besides`; `ends` follows punctuation."""
    upper, lower = (rf"[{case}\p{{Lm}}\p{{Lo}}\p{{M}}{besides}]" for case in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    words = (rf"[^\r\n\p{{L}}\p{{N}}]?{word}{suffix}" for word in (f"{upper}*{lower}+", f"{upper}+{lower}*"))
    return rf"{'|'.join(words)}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{ends}]*|{_SPACES}"


_KIMI = r"\p{Han}+|" + _cased(f"{_SUFFIX}?", _DIGITS, "", r"&&[^\p{Han}]")
_DEEPSEEK3 = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_ASIAN = r"[\u0800-\u9fa5\uac00-\ud7ff]+"
# The cased letters in the Unicode version of DeepSeek LLM's tokenizer.
_CASED = (
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\u10d0-\u10ff\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    r"\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df2a}]]"
)
_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (_QWEN2,)),
    "gpt-4o": (_cased(f"{_SUFFIX}?", _DIGITS, "/"),),
    "tekken": (_cased("", _DIGIT, "/"),),
    "kimi-k2": (_KIMI,),
    "deepseek-v3": (_DIGITS, r"[\u3040-\u30ff\u4e00-\u9fa5]+", _DEEPSEEK3),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, _DIGIT),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?{_CASED}+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _ASIAN,
        _DIGIT,
    ),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm"), (_DIGIT, _GPT2)),
    **dict.fromkeys(("gpt-2", "olmo", "default"), (_GPT2,)),
}
# Pre-tokenizers that look up whole words before merging, and that prepend BOS by default.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # pre-tokenizers that normalise texts to NFC


def tokenizer_of(file: GgufFile) -> Any:
    """The tokenizer: byte-level BPE (``gpt2``), or SentencePiece's BPE (``llama``).

    A sequence begins with BOS (``bos_token_id``) if ``add_bos_token`` says so, or by default for Llama tokenizers.

    Raises:
        ModelError: the file has no tokenizer, one of another kind, or one with an unknown pre-tokenizer; or it asks to
            append EOS.
    """
    optional("tokenizers", "text", "models")
    try:
        return _tokenizer(file)
    except ModelError:
        raise
    except Exception as error:  # `tokenizers` raises plain Exception
        raise ModelError(file.path, f"has no whole tokenizer: {error}") from None


def _tokenizer(file: GgufFile) -> Any:
    tokenizers = optional("tokenizers", "text", "models")
    kind, tokens = file.value(f"{_AT}.model"), file.value(f"{_AT}.tokens")
    if file.value(f"{_AT}.add_eos_token"):
        raise ModelError(file.path, f"{_AT}.add_eos_token: expected false, got true")
    if kind not in ("gpt2", "llama") or not tokens:
        raise ModelError(file.path, f"{_AT}.model: expected 'gpt2' or 'llama' and its tokens, got {kind!r}")
    types = file.value(f"{_AT}.token_type") or [_NORMAL] * len(tokens)
    tokenizer = _byte_level(file, tokens) if kind == "gpt2" else _sentence_piece(file, tokens, types)
    for wanted, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        found = [token for token, own in zip(tokens, types, strict=True) if own == wanted]
        add([tokenizers.AddedToken(token, normalized=False, special=wanted == CONTROL) for token in found])
    bos = file.value(f"{_AT}.bos_token_id")
    wants_bos = kind == "llama" or file.value(f"{_AT}.pre") in _WHOLE_WORDS
    if bos is not None and file.value(f"{_AT}.add_bos_token", wants_bos):
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
    model = tokenizers.models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS)
    tokenizer, cut = tokenizers.Tokenizer(model), tokenizers.pre_tokenizers
    words = [cut.Split(tokenizers.Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    tokenizer.pre_tokenizer = cut.Sequence([*words, cut.ByteLevel(add_prefix_space=False, use_regex=False)])
    if pre in _COMPOSED:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GgufFile, tokens: list[str], types: list[int]) -> Any:
    """The adjacent pair with the best score is merged first. Characters that are not tokens become byte tokens.

    A space is prepended to every text, even if it begins with a space, and to the text after a special token.
    """
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
    prefix, normal = file.value(f"{_AT}.add_space_prefix", True), tokenizers.normalizers
    spaces = normal.Replace(" ", _SPACE)
    tokenizer.normalizer = normal.Sequence([normal.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decode.Replace(_SPACE, " "), decode.ByteFallback(), decode.Fuse()]
    tokenizer.decoder = decode.Sequence([*steps, decode.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer
