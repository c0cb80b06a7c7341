"""Kernelised attention on a GPU, backward (Triton).

With P_ijr = phi_q(q_i)_r phi_k(k_j)_r / Z_i, g_ij = dout_i . v_j - delta_i and delta_i = dout_i . out_i:

    d log phi_q(q_i)_r = sum_j P_ijr g_ij,     d log phi_k(k_j)_r = sum_i P_ijr g_ij,     dv_j = sum_ir P_ijr dout_i

    pull_rows    dq; keys of earlier chunks through the state before the chunk
    pull_state   per piece of queries: dS = sum_i a_i dout_i^T, dz = - sum_i a_i delta_i, relative to the c of its state
    scan_back    gradients of the states after each piece, from the last to the first
    pull_keys    dk and dv; queries of later chunks through the gradient of the state after the chunk

Every weight is relative to the row's own log normaliser, so P <= 1 and nothing is divided. Chunks that the forward sent
through its exact form take an exact form here too.
"""

import triton
import triton.language as tl

from .forward import chunk_keys, finite, log_features, rows_of, weights_of

__all__ = ["pull_keys", "pull_rows", "pull_state", "scan_back"]


@triton.jit
def pull_rows(
    q, k, v, mask, weight, bias, tilt, sums, totals, maxima, dout, delta, log_normaliser, exact, dq,
    length, heads, groups, slots, chunks, M, D, E, weight_head, bias_head, tilt_head, square,
    T: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of queries, B Hq)."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pair = row // groups
    head = pair % heads
    slot = (pair * slots + (chunk if CAUSAL else 0)) * M
    order = tl.arange(0, T)
    tokens = chunk * T + order
    inside = tokens < length
    x = rows_of(q + row * length * D, tokens, inside, D, BD)
    grad = rows_of(dout + row * length * E, tokens, inside, E, BE)
    own = tl.load(delta + row * length + tokens, mask=inside, other=0.0)
    norm = tl.load(log_normaliser + row * length + tokens, mask=inside, other=float("inf"))
    w_head, b_head = weight + head * weight_head, bias + head * bias_head
    redo = 0
    if CAUSAL:
        redo = tl.load(exact + row * chunks + chunk)
        y, real, level = chunk_keys(
            k + pair * length * D, mask + (pair // heads) * length, tilt + head * tilt_head,
            tokens, length, square, D, BD, MASKED,
        )  # fmt: skip
        values = rows_of(v + pair * length * E, tokens, real, E, BE)
        slope = tl.dot(grad, tl.trans(values), input_precision="ieee") - own[:, None]
        slope = tl.where(order[:, None] >= order[None, :], slope, 0.0)
    result = tl.zeros((T, BD), tl.float32)
    for first in range(0, M, BM):
        features = first + tl.arange(0, BM)
        known = features < M
        w = weights_of(w_head, features, M, D, BD)
        queries = log_features(x, w, b_head, features, M)
        c = tl.load(maxima + slot + features, mask=known, other=-float("inf"))
        z = tl.load(totals + slot + features, mask=known, other=0.0)
        s = rows_of(sums + slot * E, features, known, E, BE)
        a = tl.exp(queries + c[None, :] - norm[:, None])
        dlog = a * (tl.dot(grad, tl.trans(s), input_precision="ieee") - own[:, None] * z[None, :])
        if CAUSAL:
            keys = tl.where(real[:, None], log_features(y, w, b_head, features, M) + level[:, None], -float("inf"))
            if redo > 0:
                for j in range(T):
                    key = tl.sum(tl.where((order == j)[:, None], keys, 0.0), axis=0)
                    pull = tl.sum(tl.where((order == j)[None, :], slope, 0.0), axis=1)
                    after = (order >= j)[:, None]
                    logs = tl.where(after, queries + key[None, :] - norm[:, None], -float("inf"))
                    dlog += tl.where(after, tl.exp(logs) * pull[:, None], 0.0)
            else:
                top = finite(tl.max(keys, axis=0))
                phi = tl.exp(keys - top[None, :])
                a = tl.exp(queries + top[None, :] - norm[:, None])
                dlog += a * tl.dot(slope, phi, input_precision="ieee")
        result += tl.dot(dlog, w, input_precision="ieee")
    lanes = tl.arange(0, BD)
    here = inside[:, None] & (lanes < D)[None, :]
    tl.store(dq + row * length * D + tokens[:, None] * D + lanes[None, :], result, mask=here)


@triton.jit
def pull_state(
    q, weight, bias, maxima, dout, delta, log_normaliser, dsums, dtotals,
    length, heads, groups, slots, pieces, span, M, D, E, weight_head, bias_head,
    T: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid (pieces, blocks of features, B H): what the queries of a piece want of the state they read."""
    piece, pair = tl.program_id(0), tl.program_id(2).to(tl.int64)
    features = tl.program_id(1) * BM + tl.arange(0, BM)
    known = features < M
    head = pair % heads
    slot = (pair * slots + (piece if CAUSAL else 0)) * M + features
    c = tl.load(maxima + slot, mask=known, other=-float("inf"))
    w = weights_of(weight + head * weight_head, features, M, D, BD)
    kept = tl.zeros((BM, BE), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for i in range(groups * span):
        row = pair * groups + i // span
        tokens = (piece * span + i % span) * T + tl.arange(0, T)
        inside = tokens < length
        x = rows_of(q + row * length * D, tokens, inside, D, BD)
        grad = rows_of(dout + row * length * E, tokens, inside, E, BE)
        own = tl.load(delta + row * length + tokens, mask=inside, other=0.0)
        norm = tl.load(log_normaliser + row * length + tokens, mask=inside, other=float("inf"))
        a = tl.exp(log_features(x, w, bias + head * bias_head, features, M) + c[None, :] - norm[:, None])
        kept += tl.dot(tl.trans(a), grad, input_precision="ieee")
        total -= tl.sum(a * own[:, None], axis=0)
    at = (pair * pieces + piece) * M + features
    lanes = tl.arange(0, BE)
    tl.store(dsums + at[:, None] * E + lanes[None, :], kept, mask=known[:, None] & (lanes < E)[None, :])
    tl.store(dtotals + at, total, mask=known)


@triton.jit
def scan_back(
    dsums, dtotals, maxima, after, ds_out, dz_out, ds_in, dz_in, pieces, M, E, BM: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of features, B H): each piece's slot receives the gradient of the state after it.

    maxima, after: c of the states before and after each piece.
    """
    row = tl.program_id(1).to(tl.int64)
    features = tl.program_id(0) * BM + tl.arange(0, BM)
    lanes = tl.arange(0, BE)
    known = features < M
    here = known[:, None] & (lanes < E)[None, :]
    at = row * M + features
    kept = tl.load(ds_out + at[:, None] * E + lanes[None, :], mask=here, other=0.0)
    total = tl.load(dz_out + at, mask=known, other=0.0)
    for i in range(pieces):
        slot = (row * pieces + pieces - 1 - i) * M + features
        cell = slot[:, None] * E + lanes[None, :]
        s_own = tl.load(dsums + cell, mask=here, other=0.0)
        z_own = tl.load(dtotals + slot, mask=known, other=0.0)
        tl.store(dsums + cell, kept, mask=here)
        tl.store(dtotals + slot, total, mask=known)
        before = tl.load(maxima + slot, mask=known, other=-float("inf"))
        rho = tl.exp(before - finite(tl.load(after + slot, mask=known, other=-float("inf"))))
        kept = kept * rho[:, None] + s_own
        total = total * rho + z_own
    tl.store(ds_in + at[:, None] * E + lanes[None, :], kept, mask=here)
    tl.store(dz_in + at, total, mask=known)


@triton.jit
def pull_keys(
    q, k, v, mask, weight, bias, tilt, dsums, dtotals, after, dout, delta, log_normaliser, exact, dk, dv,
    length, heads, groups, slots, chunks, M, D, E, weight_head, bias_head, tilt_head, square,
    T: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of keys, B H)."""
    chunk, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head = pair % heads
    slot = (pair * slots + (chunk if CAUSAL else 0)) * M
    order = tl.arange(0, T)
    tokens = chunk * T + order
    inside = tokens < length
    w_head, b_head, t_head = weight + head * weight_head, bias + head * bias_head, tilt + head * tilt_head
    y, real, level = chunk_keys(
        k + pair * length * D, mask + (pair // heads) * length, t_head, tokens, length, square, D, BD, MASKED
    )
    values = rows_of(v + pair * length * E, tokens, real, E, BE)
    key_grad = tl.zeros((T, BD), tl.float32)
    level_grad = tl.zeros((T,), tl.float32)
    value_grad = tl.zeros((T, BE), tl.float32)
    for first in range(0, M, BM):
        features = first + tl.arange(0, BM)
        known = features < M
        w = weights_of(w_head, features, M, D, BD)
        keys = tl.where(real[:, None], log_features(y, w, b_head, features, M) + level[:, None], -float("inf"))
        c = finite(tl.load(after + slot + features, mask=known, other=-float("inf")))
        dz = tl.load(dtotals + slot + features, mask=known, other=0.0)
        ds = rows_of(dsums + slot * E, features, known, E, BE)
        phi = tl.exp(keys - c[None, :])
        dlog = phi * (tl.dot(values, tl.trans(ds), input_precision="ieee") + dz[None, :])
        value_grad += tl.dot(phi, ds, input_precision="ieee")
        if CAUSAL:
            top = finite(tl.max(keys, axis=0))
            phi = tl.exp(keys - top[None, :])
            for g in range(groups):
                row = pair * groups + g
                x = rows_of(q + row * length * D, tokens, inside, D, BD)
                grad = rows_of(dout + row * length * E, tokens, inside, E, BE)
                own = tl.load(delta + row * length + tokens, mask=inside, other=0.0)
                norm = tl.load(log_normaliser + row * length + tokens, mask=inside, other=float("inf"))
                queries = log_features(x, w, b_head, features, M)
                visible = order[:, None] >= order[None, :]
                slope = tl.dot(grad, tl.trans(values), input_precision="ieee") - own[:, None]
                slope = tl.where(visible, slope, 0.0)
                if tl.load(exact + row * chunks + chunk) > 0:
                    for i in range(T):
                        here = order == i
                        query = tl.sum(tl.where(here[:, None], queries, 0.0), axis=0)
                        level_i = tl.sum(tl.where(here, norm, 0.0), axis=0)
                        logs = tl.where((order <= i)[:, None], query[None, :] + keys - level_i, -float("inf"))
                        weights = tl.exp(logs)
                        dlog += weights * tl.sum(tl.where(here[:, None], slope, 0.0), axis=0)[:, None]
                        pull = tl.sum(tl.where(here[:, None], grad, 0.0), axis=0)
                        value_grad += tl.sum(weights, axis=1)[:, None] * pull[None, :]
                else:
                    a = tl.exp(queries + top[None, :] - norm[:, None])
                    dlog += phi * tl.dot(tl.trans(slope), a, input_precision="ieee")
                    scores = tl.where(visible, tl.dot(a, tl.trans(phi), input_precision="ieee"), 0.0)
                    value_grad += tl.dot(tl.trans(scores), grad, input_precision="ieee")
        key_grad += tl.dot(dlog, w, input_precision="ieee")
        level_grad += tl.sum(dlog, axis=1)
    lanes = tl.arange(0, BD)
    lean = tl.load(t_head + lanes, mask=lanes < D, other=0.0)
    key_grad += level_grad[:, None] * (2.0 * square * y + lean[None, :])
    key_grad = tl.where(real[:, None], key_grad, 0.0)
    here = inside[:, None] & (lanes < D)[None, :]
    tl.store(dk + pair * length * D + tokens[:, None] * D + lanes[None, :], key_grad, mask=here)
    lanes = tl.arange(0, BE)
    here = inside[:, None] & (lanes < E)[None, :]
    tl.store(dv + pair * length * E + tokens[:, None] * E + lanes[None, :], value_grad, mask=here)
