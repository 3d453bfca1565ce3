"""Private words are replaced by the field's: no count rises, and the table of counts follows each that falls."""

from __future__ import annotations

import pytest

from tests.repo import words


@pytest.mark.skipif(not (words.ROOT / ".git").exists(), reason="not a git checkout")
def test_no_private_word_spreads() -> None:
    found = words.counts()
    assert words.MOST.keys() == found.keys()
    faults = [words.fault(word, count, words.MOST[word]) for word, count in found.items()]
    assert not any(faults), "\n".join(filter(None, faults))


@pytest.mark.parametrize(("count", "start"), [(101, '"behind" occurs 101 times, at most 100'), (94, '"behind" occurs')])
def test_a_count_that_rises_or_falls_far_is_a_fault(count: int, start: str) -> None:
    message = words.fault("behind", count, 100)
    assert message is not None
    assert message.startswith(start)
    assert ("write after" in message) == (count > 100)


@pytest.mark.parametrize("count", [95, 100])
def test_a_count_near_its_most_passes(count: int) -> None:
    assert words.fault("behind", count, 100) is None


def test_a_word_that_is_gone_stays_gone() -> None:
    assert words.fault("multiprocessor", 0, 0) is None
    assert "write SM" in str(words.fault("multiprocessor", 1, 0))


def test_every_word_is_in_the_glossary() -> None:
    glossary = (words.ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    for word in words.WORDS:
        assert f"| {word}" in glossary, word
