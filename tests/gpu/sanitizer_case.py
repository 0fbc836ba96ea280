"""Small calls of every instance of the kernels, for compute-sanitizer (tools/gpu_check.sh)."""

from __future__ import annotations

import torch

import torch_magi as magi
from torch_magi import masks
from torch_magi.ops import flex_attn_fwd, merge_state, range_gather, range_scatter_add

mask = masks.document([0, 100, 333], total=400) | masks.prefix_lm(400, 400, 40)
for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
    for dtype, softcap in ((torch.bfloat16, 0.0), (torch.float16, 3.0)):
        q = torch.randn(400, 4, dims[0], device="cuda").to(dtype).requires_grad_()
        k, v = (torch.randn(400, 2, d, device="cuda").to(dtype).requires_grad_() for d in dims)
        sink = torch.zeros(1, 4, device="cuda", requires_grad=True)
        out, aux = magi.flex_flash_attn(
            q, k, v, mask, softcap=softcap, sink=sink, return_aux=magi.AuxRequest(lse=True, max_logits=True)
        )
        loss = out.float().square().sum() + aux.lse.sum()
        grads = torch.autograd.grad(loss, (q, k, v, sink))
        print(dims, dtype, loss.item(), *(g.float().abs().sum().item() for g in grads))

# Rows whose keys several items share, merged with an earlier result.
plan = magi.make_attn_plan(masks.causal(5, 3000), 4, 2, 64, device="cuda")
q, k = (torch.randn(n, h, 64, device="cuda").bfloat16() for n, h in ((5, 4), (3000, 2)))
before = torch.randn(5, 4, 64, device="cuda"), torch.randn(5, 4, device="cuda")
out, lse, _ = flex_attn_fwd(q, k, k, plan, scale=0.1, out_before=before[0], lse_before=before[1])
print("split", out.float().abs().sum().item(), lse.sum().item())

# Whole 16-byte units and single elements; more ranges in a tile than its list holds.
for width in (7, 128):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        ranges = torch.tensor([[0, 100], [90, 300], [250, 250]] + [[20, 23]] * 2500, device="cuda")
        y = range_gather(torch.randn(300, width, device="cuda").to(dtype), ranges, 7810)
        print("ranges", width, dtype, range_scatter_add(y, ranges, 300).float().abs().sum().item())
    for dtype in (torch.float64, torch.float32):
        out, lse = (torch.randn(33, 3, *d, dtype=dtype, device="cuda") for d in ((width,), ()))
        print("merge", width, dtype, *(x.sum().item() for x in merge_state(out, lse, out.flip(0), lse.flip(0))))
