// ragged.cuh: ragged keys and values: tensors of rows, a token each, where the rows of one sequence follow those of another.
//
// Attention kernels that read a paged cache read them, too, under the constant RAGGED. A row is a block of one slot to
// them, and the number of a token's block needs no table: `num_blocks` and `max_tokens` are the number of rows, `seq_lens`
// is cu_seqlens_k, and block_tables is not read.
#pragma once
#include "platform.cuh"

template <typename length_t>
struct RaggedKeys {
    const length_t* cu_seqlens_k;  // [num_seqs + 1]: where the rows of a sequence begin, and behind the last one
    int64_t step, num_rows;

    DEVICE int64_t first_row(int64_t seq) const { return cu_seqlens_k[seq * step]; }
    // The number of tokens of a sequence; 0 where the tensors do not have its rows.
    DEVICE int length_of(int64_t seq) const {
        const int64_t begin = first_row(seq), end = first_row(seq + 1);
        return 0 <= begin && begin <= end && end <= num_rows ? int(end - begin) : 0;
    }
};
