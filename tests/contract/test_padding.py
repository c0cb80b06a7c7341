"""Contracts 3 and 5: masked keys have no weight, and a sequence gives the same alone as in a padded batch."""

import torch


def test_garbage_in_masked_keys_changes_nothing(case):
    attn, (q, k, v) = case.make(), case.inputs()
    mask = torch.rand(2, 37, generator=torch.Generator().manual_seed(2)) > 0.4
    k2, v2 = k.clone(), v.clone()
    hidden = ~mask[:, None, :, None]
    k2 = torch.where(hidden, 50.0 * torch.randn_like(k), k)
    v2 = torch.where(hidden, 1e6 * torch.randn_like(v), v)
    for is_causal in case.causal_modes:
        a = attn(q, k, v, is_causal=is_causal, key_mask=mask)
        b = attn(q, k2, v2, is_causal=is_causal, key_mask=mask)
        assert (a - b).abs().max() <= case.rounding * max(1.0, a.abs().max().item())


def test_gradient_of_masked_tokens_is_zero(case):
    attn, (q, k, v) = case.make(), case.inputs()
    mask = torch.rand(2, 37, generator=torch.Generator().manual_seed(2)) > 0.4
    for is_causal in case.causal_modes:
        q1, k1, v1 = (x.clone().requires_grad_() for x in (q, k, v))
        attn(q1, k1, v1, is_causal=is_causal, key_mask=mask, query_mask=mask).sum().backward()
        hidden = ~mask[:, None, :, None].expand(-1, 2, -1, -1)
        for x in (q1, v1, *([k1] if attn.uses_keys else [])):
            assert x.grad.masked_select(hidden).abs().max() == 0


def test_a_sequence_alone_equals_itself_in_a_batch(case):
    attn, (q, k, v) = case.make(), case.inputs(batch=3)
    lengths = [37, 23, 9]
    mask = torch.arange(37)[None] < torch.tensor(lengths)[:, None]
    for is_causal in case.causal_modes:
        together = attn(q, k, v, is_causal=is_causal, key_mask=mask, query_mask=mask)
        for i, length in enumerate(lengths):
            alone = attn(*(x[i : i + 1, :, :length] for x in (q, k, v)), is_causal=is_causal)
            assert (together[i : i + 1, :, :length] - alone).abs().max() <= case.tolerance
            assert together[i, :, length:].abs().sum() == 0


def test_all_keys_masked_gives_zero_and_a_finite_gradient(case):
    attn, (q, k, v) = case.make(), case.inputs()
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[0] = False
    for is_causal in case.causal_modes:
        q1, k1, v1 = (x.clone().requires_grad_() for x in (q, k, v))
        out = attn(q1, k1, v1, is_causal=is_causal, key_mask=mask)
        assert (out[0] == 0).all()
        assert (out[1] != 0).any()
        out.sum().backward()
        used = (q1, v1, *([k1] if attn.uses_keys else []))
        assert all(x.grad is not None and x.grad.isfinite().all() for x in used)


def test_not_even_nan_in_masked_keys_matters(first_case):
    attn, (q, k, v) = first_case.make(), first_case.inputs()
    mask = torch.rand(2, 37, generator=torch.Generator().manual_seed(2)) > 0.4
    hidden = ~mask[:, None, :, None]
    for is_causal in first_case.causal_modes:
        want = attn(q, k, v, is_causal=is_causal, key_mask=mask)
        for garbage in (float("nan"), float("inf")):
            k2, v2 = (x.masked_fill(hidden, garbage).requires_grad_() for x in (k, v))
            out = attn(q, k2, v2, is_causal=is_causal, key_mask=mask)
            assert (out - want).abs().max() <= first_case.rounding * max(1.0, want.abs().max().item())
            out.sum().backward()
            used = (v2, *([k2] if attn.uses_keys else []))
            assert all(x.grad is not None and x.grad.isfinite().all() for x in used)


def test_padding_takes_no_place_in_a_window(placed_case):
    """A masked token is not there: the others stand as if it had never been, and its own output is 0."""
    attn, (q, k, v) = placed_case.make(), placed_case.inputs(batch=1, length=41)
    mask = torch.rand(1, 41, generator=torch.Generator().manual_seed(6)) > 0.3
    mask[0, :2] = mask[0, 20:23] = False  # also in front, and a gap
    real = mask[0].nonzero().flatten()
    for is_causal in placed_case.causal_modes:
        out = attn(q, k, v, is_causal=is_causal, key_mask=mask)
        alone = attn(*(x[:, :, real] for x in (q, k, v)), is_causal=is_causal)
        assert (out[:, :, real] - alone).abs().max() <= placed_case.rounding * max(1.0, alone.abs().max().item())
        assert (out[:, :, ~mask[0]] == 0).all()
