"""Counts of private words, which `test_words.py` lets only fall. docs/glossary.md has the field's words.

`python -m tests.repo.words` prints `MOST` as the tree is now.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENDINGS = (".py", ".cu", ".cuh", ".h", ".md")
OWN = ("docs/glossary.md", "tests/repo/words.py", "tests/repo/test_words.py")  # the files that name the words

# {word: (pattern, the folder name that a path must contain, the field's word)}
WORDS = {
    "multiprocessor": (r"\bmultiprocessors?\b", "", "SM"),
    "of which": (r"\bof which\b", "", "a sentence with the noun as its subject"),
    "whose": (r"\bwhose\b", "", "a sentence with the noun as its subject, or `with`"),
    "place": (r"(?<!\bin[ -])\bplaces?\b", "", "slot, offset, position or index; 2:4 metadata"),
    "join": (r"(?<!\.)\bjoin(?:s|ed|ing)?\b", "attention", "combine (split-KV), reduce"),
    "codes": (r"\bcodes\b", "", "quantized values, quants, fp8 values, packed weights"),
    "turn": (r"(?<!\bin )\bturn(?:s|ed|ing)?\b", "", "rotate (RoPE), ping-pong order, convert"),
    "copy engine": (r"\bcopy engines?\b", "", "TMA"),
    "largest logit": (r"\blargest logits?\b", "", "row max"),
    "shrink": (r"\bshrinks?\b", "", "rescale, correction factor"),
    "behind": (r"\bbehind\b", "", "after"),
    "beside": (r"\bbeside\b", "", "next to, together with, against"),
    "anew": (r"\banew\b", "", "again; recompute"),
    "room": (r"\brooms?\b", "", "space, capacity; fits"),
    "apart": (r"\bapart\b", "", "stride; separate"),
    "widen": (r"\bwiden(?:s|ed|ing)?\b", "", "upcast, dequantize, convert"),
    "sums": (r"\bsums\b", "", "accumulators, partial sums"),
}

# The most that each word may occur. A change that lowers a count lowers the number here.
MOST: dict[str, int] = {
    "multiprocessor": 0,
    "of which": 8,
    "whose": 33,
    "place": 742,
    "join": 2,
    "codes": 961,
    "turn": 283,
    "copy engine": 0,
    "largest logit": 10,
    "shrink": 22,
    "behind": 91,
    "beside": 121,
    "anew": 4,
    "room": 54,
    "apart": 102,
    "widen": 21,
    "sums": 509,
}


def counts() -> dict[str, int]:
    """How often each word occurs in the tracked files, in any case."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    paths = [path for path in listed.split("\0") if path.endswith(ENDINGS) and path not in OWN]
    texts = {path: re.sub(r"\s+", " ", (ROOT / path).read_text(encoding="utf-8").lower()) for path in paths}
    return {
        word: sum(len(re.findall(pattern, text)) for path, text in texts.items() if folder in path)
        for word, (pattern, folder, _) in WORDS.items()
    }


def fault(word: str, count: int, most: int) -> str | None:
    """The fault of a count: it rose, or it fell by more than 5 % and `MOST` did not follow."""
    if count > most:
        return f'"{word}" occurs {count} times, at most {most} allowed: write {WORDS[word][2]} (docs/glossary.md)'
    if count < 0.95 * most:
        return f'"{word}" occurs {count} times: lower MOST["{word}"] from {most} (python -m tests.repo.words)'
    return None


if __name__ == "__main__":
    print("MOST: dict[str, int] = {")
    for word, count in counts().items():
        print(f'    "{word}": {count},')
    print("}")
