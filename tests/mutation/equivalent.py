"""Generated mutants that are known to change no result. `python -m tests.mutation` names those that are gone."""

from __future__ import annotations

# Name of a mutant -> why no test can notice it.
EQUIVALENT: dict[str, str] = {
    "attention/attention_decode_simt.cu:cast:0f8816a5": "a head's number times HEAD_SIZE fits in 32 bits",
    "attention/attention_varlen.cu:predicate:f9c38b89": "without ALiBi the slopes are 0, which add nothing",
    "cache/gather_cache.cu:arithmetic:df411b4a": "what is asked of a cache ahead of its use changes no result",
    "include/paged.cuh:cast:e0443a01": "a product of 64 bits has the same bits with a sign and without",
    "include/packed.cuh:cast:58d6546e": "the parameter that takes the value is a float",
    "include/span.cuh:exit:0734c801": "a whole vector has the same elements if they are loaded one by one",
    "sampling/sampling_row.cu:condition:545b3ddc": "every lane has the extremes; atomics of the others change nothing",
    "sampling/top_k_per_row.cu:cast:604bdf17": "the bit of a bool has the same place in int and in uint32_t",
}
