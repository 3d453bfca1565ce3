"""python time_gdn.py [tokens:seqs:heads:key_heads ...]: us of gated_delta_rule for each configuration, in CUDA graphs, and of its kernels."""
import sys, torch
import pyops
from pyops import tuning
from pyops.ops.mamba._gated_delta_sm90_plan import GatedDeltaSm90Config as C
torch.manual_seed(0)
op = pyops.registry["gated_delta_rule"]

def graph_us(fn, n=20):
    for _ in range(3): fn()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(n): fn()
    g.replay(); torch.cuda.synchronize()
    best = []
    for _ in range(7):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize()
        best.append(a.elapsed_time(b) * 1e3 / n)
    return sorted(best)[len(best) // 2]

def make(tokens, seqs, heads, kh, dtype=torch.bfloat16):
    d = "cuda"
    q = torch.randn(1, tokens, kh, 128, device=d).to(dtype); k = torch.randn_like(q.float()).to(dtype)
    v = torch.randn(1, tokens, heads, 128, device=d).to(dtype)
    g = torch.nn.functional.logsigmoid(torch.randn(1, tokens, heads, device=d) + 2)
    beta = torch.rand(1, tokens, heads, device=d).to(dtype)
    cu = torch.arange(seqs + 1, device=d, dtype=torch.int32) * (tokens // seqs)
    init = torch.zeros(seqs, heads, 128, 128, device=d)
    last = torch.empty_like(init); o = torch.empty_like(v)
    return lambda: pyops.gated_delta_rule(q, k, v, g, beta, 128**-0.5, init, cu, True, False, last, o=o), o, last

rows = sys.argv[1:] or ["8192:1:8:4", "8192:1:16:8", "8192:1:32:16", "8192:1:64:16", "8192:2:64:16", "574:1:48:16", "8192:1:8:8", "8192:1:64:64"]
for row in rows:
    tokens, seqs, heads, kh = map(int, row.split(":"))
    call, o, last = make(tokens, seqs, heads, kh)
    op.forget()
    chosen = graph_us(call)
    ref = o.clone(), last.clone()
    print(f"{row}: chosen {chosen:.1f} us", flush=True)
    for c in [(64, 1), (128, 1), (64, 2), (128, 2), (64, 4), (64, 6), (64, 8), (64, 12), (128, 4), (128, 8)]:
        if tokens < 1000 and c[1] > 4: continue
        with tuning.forced("gated_delta_rule", C(*c)):
            op.forget()
            us = graph_us(call)
            err = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip((o, last), ref)]
        print(f"    rows {c[0]} segments {c[1]}: {us:.1f} us, differs {err[0]:.1e} {err[1]:.1e}", flush=True)
    op.forget()
# kernels of one call each
from torch.profiler import profile, ProfilerActivity
for row, c in [("8192:1:8:4", (64, 8)), ("8192:1:8:4", (64, 1)), ("8192:1:32:16", (64, 2)), ("8192:1:64:16", (64, 1)), ("8192:2:64:16", (128, 1))]:
    tokens, seqs, heads, kh = map(int, row.split(":"))
    call, o, last = make(tokens, seqs, heads, kh)
    with tuning.forced("gated_delta_rule", C(*c)):
        op.forget()
        for _ in range(3): call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            for _ in range(5): call()
            torch.cuda.synchronize()
    print(row, c)
    for e in prof.key_averages():
        t = getattr(e, "device_time_total", None) or getattr(e, "cuda_time_total", 0)
        if t: print(f"    {e.key[:50]}: {t / e.count:.1f} us x {e.count // 5}")
