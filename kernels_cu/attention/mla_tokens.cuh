// mla_tokens.cuh: where the latent entry of a token lies in the MLA cache. Reads the constants of the kernel that
// includes it.
//
// A sequence has a row of page_table. The row has the page of every PAGE_SIZE tokens, or, with LISTS_SLOTS, the slot of
// each token: sparse attention, which lists tokens in any order. Slot number page * PAGE_SIZE + offset is slot `offset`
// of the page.
//
// With QUERY_TOKENS > 1, the query tokens of a sequence are its last ones, and what kernels count as its heads are the
// heads of each of these tokens, token by token. A token attends to no later one.
#pragma once
#include "paged.cuh"

// QUERY_TOKENS > 1: how many of the `length` tokens of a sequence a head attends to: the first ones; 0 or less: none.
DEVICE int attended_tokens(int length, int head, int64_t num_heads) {
    return length - QUERY_TOKENS + 1 + head / (int(num_heads) / QUERY_TOKENS);
}

struct TokenTable {
    const table_t* row;
    int64_t step;  // stride of a row of pages, in elements; slots are contiguous
    int64_t num_pages, page_stride, slot_stride;

    // The element of the row for a token.
    DEVICE int64_t at(int token) const { return LISTS_SLOTS ? row[token] : row[token / PAGE_SIZE * step]; }
    // Whether this element has a page, or slot, that exists.
    DEVICE bool exists(int64_t found) const { return found >= 0 && page_of(found) < num_pages; }
    // The offset of the token's entry in the cache, in elements, if it exists.
    DEVICE int64_t offset(int64_t found, int token) const {
        const int slot = LISTS_SLOTS ? int(uint64_t(found) % PAGE_SIZE) : token % PAGE_SIZE;
        return page_of(found) * page_stride + slot * slot_stride;
    }
    DEVICE int64_t find(int64_t found, int token) const { return exists(found) ? offset(found, token) : NOWHERE; }

private:
    static DEVICE int64_t page_of(int64_t found) { return LISTS_SLOTS ? int64_t(uint64_t(found) / PAGE_SIZE) : found; }
};
