"""The counts of private words never rise, and the table of counts follows each count that falls."""

from __future__ import annotations

import pytest

from tests.repo import words


@pytest.mark.skipif(not (words.ROOT / ".git").exists(), reason="not a git checkout")
def test_no_count_of_a_private_word_rises() -> None:
    found = words.counts()
    assert words.MOST.keys() == found.keys()
    faults = [words.fault(word, count, words.MOST[word]) for word, count in found.items()]
    assert not any(faults), "\n".join(filter(None, faults))


@pytest.mark.parametrize(("count", "start"), [(101, '"behind" occurs 101 times, at most 100'), (94, '"behind" occurs')])
def test_count_far_from_its_most_is_a_fault(count: int, start: str) -> None:
    message = words.fault("behind", count, 100)
    assert message is not None
    assert message.startswith(start)
    assert ("write after" in message) == (count > 100)


@pytest.mark.parametrize("count", [95, 100])
def test_count_near_its_most_passes(count: int) -> None:
    assert words.fault("behind", count, 100) is None


def test_word_with_count_zero_stays_out() -> None:
    assert words.fault("multiprocessor", 0, 0) is None
    assert "write SM" in str(words.fault("multiprocessor", 1, 0))


def test_every_word_is_in_the_glossary() -> None:
    glossary = (words.ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    for word in words.WORDS:
        assert f"| {word}" in glossary, word
