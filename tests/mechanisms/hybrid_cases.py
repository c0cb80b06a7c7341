"""Tokens and mechanisms that the tests of hybrid attention share."""

import torch

import subquad as sq

PERFORMER = {"mechanism": "performer", "num_features": 16, "seed": 1}


def tokens(length, batch=1, heads=2, kv_heads=None, dim=4, width=3, dtype=torch.float64, norm=0.7, seed=0):
    """q, k, v around means of their own, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads, width):
        return torch.randn(batch, heads, length, width, generator=generator, dtype=torch.float64)

    kv_heads = kv_heads or heads
    q, k, v = norm * draw(heads, dim) + 0.2, norm * draw(kv_heads, dim) - 0.1, draw(kv_heads, width)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def hybrid(far, window, sinks, heads=2, kv_heads=None, dim=4):
    """A hybrid, calibrated and with uneven gains where it has them."""
    attn = sq.create("hybrid", dim, heads, kv_heads, window=window, sinks=sinks, far=far)
    q, k, _ = tokens(60, heads=heads, kv_heads=kv_heads, dim=dim, seed=9)
    if attn.uses_calibration:
        attn.calibrate(q, k)
    if attn.log_scale is not None:
        with torch.no_grad():
            attn.log_scale.copy_(torch.linspace(-0.5, 0.7, heads))
    return attn


def product(phi, q, k, scale):
    """phi(q) . phi(k), written out: what the far field weighs each pair by."""
    rows, keys = phi.queries(q, scale), phi.keys(k, scale)

    def whole(features):
        values = 1.0 if features.values is None else features.values
        return values if features.log_scale is None else values * features.log_scale.exp()

    return whole(rows) @ whole(keys).mT
