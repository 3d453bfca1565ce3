// concat_and_cache_ds_mla: writes a token's latent vector, quantised, and its rotary key into a 656-byte entry of a
// paged cache.
//
//     kv_cache[block, offset] = [512 fp8 values, four float32 scales s, 64 elements of k_pe]
//     s[i] = max(max |x| / 448, 2^-126),   value = e4m3(x / s)
//     for tile i of 128 elements x of kv_c; NaN is ignored in the maximum
//     where block, offset = divmod(slot_mapping[t], BLOCK_SIZE); a slot that does not exist is skipped
//
// Thread mapping: 64 threads for each token, 8 elements for each thread. 16 lanes share a tile; the first 8 threads
// copy the rotary key.
//
// Constants
//     scalar_t      element type of kv_c and k_pe, of two bytes
//     slot_t        element type of slot_mapping
//     ACCESS_SIZE   elements of kv_c and k_pe in one memory access
//     ENTRY_ACCESS  bytes of an entry in one memory access

#include "cache.cuh"
#include "paged.cuh"
#include "quant.cuh"
#include "reduce.cuh"

constexpr int VEC_SIZE = 8;
constexpr int LATENT_SIZE = 512, ROPE_SIZE = 64, TILE_SIZE = 128;
constexpr int TOKEN_THREADS = LATENT_SIZE / VEC_SIZE;
constexpr int SCALES = LATENT_SIZE, ROPE = LATENT_SIZE + 4 * (LATENT_SIZE / TILE_SIZE);  // bytes from the entry's start
constexpr int CODE_ACCESS = ENTRY_ACCESS < 8 ? ENTRY_ACCESS : 8, SCALE_ACCESS = ENTRY_ACCESS < 4 ? ENTRY_ACCESS : 4;
using vec_t = Vec<scalar_t, VEC_SIZE>;

extern "C" __global__ void LAUNCH_BOUNDS(NUM_THREADS, 1)
concat_and_cache_ds_mla(const scalar_t* kv_c,        // [num_tokens, 512]
                        const scalar_t* k_pe,        // [num_tokens, 64]
                        uint8_t* kv_cache,           // [num_blocks, BLOCK_SIZE, 656]
                        const slot_t* slot_mapping,  // [num_tokens]
                        int64_t num_tokens, int64_t num_blocks, int64_t slot_mapping_stride, int64_t kv_c_stride,
                        int64_t k_pe_stride, int64_t block_stride, int64_t slot_stride) {
    await_previous_kernel();
    const int64_t token = int64_t(blockIdx.x) * (NUM_THREADS / TOKEN_THREADS) + threadIdx.x / TOKEN_THREADS;
    const int thread = threadIdx.x % TOKEN_THREADS, element = thread * VEC_SIZE;
    const Pages<BLOCK_SIZE> pages{num_blocks, block_stride, slot_stride};
    int64_t at = NOWHERE;
    vec_t x = vec_t::full(0.0f), rope = x;
    if (token < num_tokens) {
        at = pages.at_slot(slot_mapping[token * slot_mapping_stride]);
        x = vec_t::load<ACCESS_SIZE>(kv_c + token * kv_c_stride + element);
        if (element < ROPE_SIZE) rope = vec_t::load<ACCESS_SIZE>(k_pe + token * k_pe_stride + element);
    }
    constexpr float largest = Codes<fp8_e4m3_t>::largest;
    const float absmax = lane_reduce<Max, TILE_SIZE / VEC_SIZE>(x.absmax());
    if (at == NOWHERE) return;
    const float scale = fmaxf(ieee_divide(absmax, largest), 0x1p-126f);

    uint8_t* entry = kv_cache + at;
    Vec<uint8_t, 8> codes;
    codes.word<8>(0) = encode<fp8_e4m3_t>(x, Quotient(scale)).template word<8>(0);
    codes.store<CODE_ACCESS>(entry + element);
    if (element % TILE_SIZE == 0) store_float<SCALE_ACCESS>(entry + SCALES + element / TILE_SIZE * 4, scale);
    if (element < ROPE_SIZE) {
        Vec<uint8_t, 16> bytes;
        bytes.word<16>(0) = rope.word<VEC_SIZE>(0);
        bytes.store<ENTRY_ACCESS>(entry + ROPE + element * 2);
    }
}
