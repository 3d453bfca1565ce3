"""Generated mutants that are known to change no result. `python -m tests.mutation` names those that are gone."""

from __future__ import annotations

# Name of a mutant -> why no test can notice it.
EQUIVALENT: dict[str, str] = {
    "attention/attention_decode_simt.cu:cast:0f8816a5": "a head's number times HEAD_SIZE fits in 32 bits",
    "attention/attention_varlen.cu:barrier:7fd8270c": "behind the last tile no thread reads what copies write",
    "attention/attention_varlen.cu:predicate:f9c38b89": "without ALiBi the slopes are 0, which add nothing",
    "attention/mla_decode.cu:bound:b986be1d": "the row of a chunk that is not the lane's own leads to no access",
    "cache/gather_cache.cu:arithmetic:df411b4a": "what is asked of a cache ahead of its use changes no result",
    "include/chunk_scan.cuh:bound:5c7a8024": "where part_tokens are left, both ends are the same",
    "include/cluster.cuh:comparison:d7d748c7": "every thread of a cluster of one block arrives at the barrier",
    "include/cluster.cuh:predicate:7faa5560": "block 0 of a cluster of one block is the block itself",
    "include/decode_tile.cuh:comparison:a231878b": "such a step is asked token by token, with the same answers",
    "include/decode_tile.cuh:constant:d199d49b": "with units of one token, every number would be the lane's own",
    "include/fp4.cuh:comparison:9a079c39": "a product that is in doubt is computed exactly",
    "include/masked_edit.cuh:comparison:a86417a5": "where N elements are left, int(left) is N",
    "include/math.cuh:comparison:fc95ac15": "for 87 the divisor is below 2^126, and quotient is right",
    "include/packed.cuh:cast:58d6546e": "the parameter that takes the value is a float",
    "include/paged.cuh:cast:e0443a01": "a product of 64 bits has the same bits with a sign and without",
    "include/paged.cuh:constant:f0e990cb": "a binary search may look at any number of the upper half",
    "include/select.cuh:exit:7ae9ea8c": "what such a thread searches does not hold `left`",
    "include/span.cuh:bound:d8925705": "one more vector holds no element",
    "include/span.cuh:comparison:9c747677": "a round that begins behind the last vector finds none",
    "include/span.cuh:exit:0734c801": "a whole vector has the same elements if they are loaded one by one",
    "linear/sparse_compress.cu:cast:9c350399": "the places of a group are small and positive",
    "quantize/awq_dequantize.cu:cast:3a3253eb": "a product of 64 bits has the same bits with a sign and without",
    "quantize/dynamic_tensor_quant.cu:cast:d14c1dd5": "a quotient of numbers of 32 bits is the same in 64 bits",
    "quantize/ggml_dequantize.cu:comparison:10ffbb84": "four bytes are copied by the other way, to the same place",
    "quantize/group_quant.cu:cast:587b35a7": "the array that takes the value is one of int32_t",
    "rotary/rotary_embedding.cu:comparison:45a0957a": "3 * SECTION_W leaves no rest of 2, which the pair must leave",
    "sampling/apply_repetition_penalties.cu:condition:589119e6": "a true division rounds to the same result",
    "sampling/sampling_filter.cu:exit:b2ce556c": "further digits keep the same keys",
    "sampling/sampling_pick.cu:constant:c3baabc0": "another thread of the block writes the same value",
    "sampling/sampling_row.cu:condition:545b3ddc": "every lane has the extremes; atomics of the others change nothing",
    "sampling/top_k_per_row.cu:cast:604bdf17": "the bit of a bool has the same place in int and in uint32_t",
}
