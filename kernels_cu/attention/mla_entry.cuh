// mla_entry.cuh: a latent entry of the MLA cache: the latent vector and the rotated key (RoPE) of a token.
//
// Both are contiguous elements of cache_t. With IS_DS_MLA ("fp8_ds_mla"), an entry has 656 bytes: the latent vector as
// e4m3, one float32 scale per SCALED_SIZE elements, and the rotated key as 16-bit elements.
#pragma once
#include "widen.cuh"

constexpr int LATENT_SIZE = 512, ROPE_SIZE = 64, ENTRY_SIZE = LATENT_SIZE + ROPE_SIZE;
constexpr int SCALED_SIZE = 128, SCALES_AT = LATENT_SIZE, ROPE_AT = SCALES_AT + LATENT_SIZE / SCALED_SIZE * 4;  // bytes
constexpr int ENTRY_BYTES = IS_DS_MLA ? ROPE_AT + ROPE_SIZE * 2 : ENTRY_SIZE * int(sizeof(cache_t));
