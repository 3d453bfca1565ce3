import torch
from hypothesis import given, settings
from torch.nn.functional import scaled_dot_product_attention

import pyops
from pyops.testing import cpu, strategies

caches = strategies.paged_caches("float16", layout="flash", block_sizes=(16,), max_seqs=3)


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(cache=caches, rows=strategies.tensors((3, 256), "float16", kinds=["normal"]))
def test_decode(cache, rows):
    query = rows[: len(cache.seq_lens)].unflatten(1, (4, 64))  # may be misaligned, and have gaps between rows
    out = torch.empty(query.shape, dtype=torch.float16)
    keys_values, sequences = (cache.key_cache, cache.value_cache), (cache.block_tables, cache.seq_lens, 16)
    with cpu("kernels"):
        pyops.paged_attention_v1(out, query, *keys_values, 2, 0.125, *sequences, 100, None, "auto", 1.0, 1.0)
    for i, q in enumerate(query.float()):
        k, v = (tokens.float().transpose(0, 1) for tokens in cache.tokens(i))
        expected = scaled_dot_product_attention(q[:, None], k, v, enable_gqa=True)[:, 0]
        torch.testing.assert_close(out[i].float(), expected.nan_to_num(), rtol=2**-9, atol=2**-9)  # 0 without keys


test_decode()  # or python -m pytest
print("20 drawn caches, tables and layouts match SDPA")
