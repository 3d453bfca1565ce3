"""The random numbers of the references: Philox4x32-10 (Salmon et al. 2011)."""

from __future__ import annotations

_WORD = 2**32 - 1


def philox(seed: int, offset: int, *counter: int) -> int:
    """64 random bits: the first two words of Philox4x32-10 with the key `seed` and the counter (offset, *counter).

    Seed and offset have 64 bits; each of up to two further parts of the counter has 32.
    """
    key, words = [seed & _WORD, seed >> 32 & _WORD], [offset & _WORD, offset >> 32 & _WORD, *(*counter, 0, 0)[:2]]
    for _ in range(10):
        even, odd = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [odd >> 32 ^ words[1] ^ key[0], odd & _WORD, even >> 32 ^ words[3] ^ key[1], even & _WORD]
        key = [key[0] + 0x9E3779B9 & _WORD, key[1] + 0xBB67AE85 & _WORD]
    return words[1] << 32 | words[0]
