"""Attention, defined (architecture D7), in torch over the "plain" KV layout, any page size.

Keys are cut on a grid of 128 positions. For a query row each cut that holds a visible key gives m = max score, w = exp(score - m) (exactly zero
where masked), sum w and acc = sum w * v; cuts are merged in ascending order: M' = max(M, m), both sides scaled by exp(old max - M'); the output is
acc / sum. Native kernels fix the order of additions inside a cut as well; here it is torch's matmul's.
What holds for bits: every matmul has the same shape, [16 query positions * group, D] x [D, 128], on grids of absolute positions padded with
zeros, and each request is computed on its own. So a row's bits depend on its own keys only: not on the batch, its order, chunking, or pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rootlet.kernels.ops import AttentionMeta, KVLayer

CUT = 128
QUERY_BLOCK = 16


def store_kv(k: Tensor, v: Tensor, layer: KVLayer, out_cache_loc: Tensor) -> None:
    """k, v float32 [T, Hkv*D] -> layer at slots out_cache_loc int32 [>= T]; float16 and int8 round to nearest even."""
    assert layer.layout == "plain", "the reference reads and writes the plain layout"
    heads, d = layer.v.shape[1], layer.v.shape[3]
    slots = out_cache_loc[: k.shape[0]].to(torch.int64)
    page, offset = slots // layer.page_size, slots % layer.page_size
    for x, to, scales in ((k, layer.k, layer.k_scales), (v, layer.v, layer.v_scales)):
        values = x.view(-1, heads, d)
        if scales is not None:
            values, scales[page, :, offset] = _to_int8(values)
        to[page, :, offset] = values.to(to.dtype)


def _to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, Hkv, D] -> whole numbers in [-127, 127], and the scale of each vector [T, Hkv]: max|x| / 127, NaN where x holds inf or NaN."""
    top = x.abs().amax(dim=-1, keepdim=True)
    usable = torch.isfinite(top) & (top >= 1e-30)
    inverse = torch.where(usable, 127.0 / top, 0.0)
    scale = torch.where(usable, top / 127.0, torch.where(torch.isfinite(top), 0.0, torch.nan))
    return torch.where(usable, torch.round(x * inverse), 0.0), scale.squeeze(-1)


def attention(q: Tensor, layer: KVLayer, meta: AttentionMeta, scale: float, window: int | None = None) -> Tensor:
    """q float32 [T, H*D] -> [T, H*D]. Rows outside every request of `meta` come back zero."""
    assert layer.layout == "plain", "the reference reads and writes the plain layout"
    out = torch.zeros_like(q)
    begins = meta.qo_indptr.tolist()
    prefix_lens, row_ids = meta.prefix_lens.tolist(), meta.row_ids.tolist()
    for b, row in enumerate(row_ids):
        begin, end = begins[b], begins[b + 1]
        if end > begin:
            out[begin:end] = _attend_request(q[begin:end], layer, pages=meta.page_table[row], prefix_len=prefix_lens[b], scale=scale, window=window)
    return out


def _attend_request(q: Tensor, layer: KVLayer, *, pages: Tensor, prefix_len: int, scale: float, window: int | None) -> Tensor:
    """q [n, H*D] at positions prefix_len.. of one request whose page table is `pages`."""
    n, heads, d = q.shape[0], layer.v.shape[1], layer.v.shape[3]
    group = q.shape[1] // (heads * d)
    kv_len = prefix_len + n
    first_block, last_block = prefix_len // QUERY_BLOCK, -(-kv_len // QUERY_BLOCK)
    padded = q.new_zeros((last_block - first_block) * QUERY_BLOCK, heads * group * d)
    at = prefix_len - first_block * QUERY_BLOCK
    padded[at : at + n] = q * scale
    tiles = padded.view(-1, QUERY_BLOCK, heads, group, d).permute(0, 2, 1, 3, 4).reshape(-1, heads, QUERY_BLOCK * group, d)
    result = torch.empty_like(tiles)
    for i in range(tiles.shape[0]):
        result[i] = _attend_block(tiles[i], layer, pages=pages, q_begin=(first_block + i) * QUERY_BLOCK, kv_len=kv_len, window=window)
    rows = result.view(-1, heads, QUERY_BLOCK, group, d).permute(0, 2, 1, 3, 4).reshape(-1, heads * group * d)
    return rows[at : at + n]


def _attend_block(q: Tensor, layer: KVLayer, *, pages: Tensor, q_begin: int, kv_len: int, window: int | None) -> Tensor:
    """q [Hkv, 16*group, D], scaled, the tile of positions q_begin..q_begin+15 -> [Hkv, 16*group, D]."""
    group = q.shape[1] // QUERY_BLOCK
    position = torch.arange(q_begin, q_begin + QUERY_BLOCK).repeat_interleave(group).unsqueeze(1)
    end = min(kv_len, q_begin + QUERY_BLOCK)
    low = 0 if window is None else max(0, q_begin - window + 1)
    best = q.new_full((q.shape[0], q.shape[1], 1), -torch.inf)
    total, acc = torch.zeros_like(best), torch.zeros_like(q)
    for cut in range(low // CUT, -(-end // CUT)):
        keys, values = _gather(layer, pages, max(low, cut * CUT), min(end, (cut + 1) * CUT), cut * CUT)
        key = torch.arange(cut * CUT, (cut + 1) * CUT)
        hidden = (key > position) | (key >= end)
        if window is not None:
            hidden |= key <= position - window
        score = torch.bmm(q, keys.transpose(1, 2)).masked_fill(hidden, -torch.inf)
        m = score.amax(dim=2, keepdim=True)
        live = ~hidden.all(dim=1, keepdim=True)
        weight = torch.exp(score - m).masked_fill(hidden, 0.0)
        new_best = torch.where(live, torch.maximum(best, m), best)
        old_scale, cut_scale = torch.exp(best - new_best), torch.exp(m - new_best)
        old_scale = torch.where(torch.isneginf(best), 0.0, old_scale)
        total = torch.where(live, total * old_scale + weight.sum(dim=2, keepdim=True) * cut_scale, total)
        acc = torch.where(live, acc * old_scale + torch.bmm(weight, values) * cut_scale, acc)
        best = new_best
    return acc / torch.where(total == 0, 1.0, total)


def _gather(layer: KVLayer, pages: Tensor, begin: int, end: int, cut_begin: int) -> tuple[Tensor, Tensor]:
    """Keys and values of positions [begin, end) as float32 [Hkv, 128, D] at their place in the cut; zeros elsewhere."""
    p = layer.page_size
    position = torch.arange(begin, end)
    page = pages[position // p].to(torch.int64)
    heads, d = layer.v.shape[1], layer.v.shape[3]
    keys, values = torch.zeros(heads, CUT, d), torch.zeros(heads, CUT, d)
    at = slice(begin - cut_begin, end - cut_begin)
    for to, held, scales in ((keys, layer.k, layer.k_scales), (values, layer.v, layer.v_scales)):
        x = held[page, :, position % p].to(torch.float32)
        if scales is not None:
            x = x * scales[page, :, position % p].unsqueeze(-1)
        to[:, at] = x.transpose(0, 1)
    return keys, values
