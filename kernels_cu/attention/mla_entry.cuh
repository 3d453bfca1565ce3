// mla_entry.cuh: an entry of the cache of multi-head latent attention: a latent vector and a rotated key.
//
// Both are elements of cache_t, one after another. Or, with IS_DS_MLA ("fp8_ds_mla"), an entry is 656 bytes: the latent
// vector as codes of e4m3; the scales of SCALED_SIZE codes each, float32; the rotated key, of 16-bit elements.
#pragma once
#include "widen.cuh"

constexpr int LATENT_SIZE = 512, ROPE_SIZE = 64, ENTRY_SIZE = LATENT_SIZE + ROPE_SIZE;
constexpr int SCALED_SIZE = 128, SCALES_AT = LATENT_SIZE, ROPE_AT = SCALES_AT + LATENT_SIZE / SCALED_SIZE * 4;  // bytes
constexpr int ENTRY_BYTES = IS_DS_MLA ? ROPE_AT + ROPE_SIZE * 2 : ENTRY_SIZE * int(sizeof(cache_t));
