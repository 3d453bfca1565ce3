// ragged.cuh: ragged keys and values: tensors with one row per token, in which the rows of the sequences follow each
// other.
//
// With RAGGED, attention kernels for a paged cache read them as blocks of one slot. The block number of a token needs
// no block table: `num_blocks` and `max_tokens` are the number of rows, `seq_lens` is cu_seqlens_k, and block_tables is
// not read.
#pragma once
#include "platform.cuh"

template <typename length_t>
struct RaggedKeys {
    const length_t* cu_seqlens_k;  // [num_seqs + 1]: first row of each sequence, then the end of the last one
    int64_t step, num_rows;

    DEVICE int64_t first_row(int64_t seq) const { return cu_seqlens_k[seq * step]; }
    // The number of tokens of a sequence; 0 if its rows lie outside of the tensors.
    DEVICE int length_of(int64_t seq) const {
        const int64_t begin = first_row(seq), end = first_row(seq + 1);
        return 0 <= begin && begin <= end && end <= num_rows ? int(end - begin) : 0;
    }
};
