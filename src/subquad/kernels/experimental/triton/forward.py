"""Kernelised attention on a GPU, forward (Triton): features are computed in the kernels and never stored.

    log phi_q = W q + bias,     log phi_k = W k + bias + square |k|^2 + tilt . k,     -inf for masked keys

    absorb_pieces   per piece of the sequence: S = sum phi_k v^T e^{-c}, z = sum phi_k e^{-c}, c = max log phi_k
    scan_pieces     pieces joined in order: the states before each of them, and the last
    attend_rows     out = (a S + tril(a phi^T) V) / (a z + tril(a phi^T) 1) for the rows of a chunk, and log normalisers

In a chunk one shift per feature serves all rows. Rows that lose their own keys that way (normaliser below 1e-20, or NaN
of a later key) send the whole chunk through the exact form, key after key, each row relative to its own maximum.

Products are IEEE float32 (no TF32): the error of a projection goes into an exponent. All tensors are contiguous;
`heads` are key heads, `groups` the queries that share one. M is cut into blocks of BM; D and E stand in one block each.
"""

import triton
import triton.language as tl

__all__ = [
    "absorb_pieces",
    "attend_rows",
    "chunk_keys",
    "finite",
    "log_features",
    "rows_of",
    "scan_pieces",
    "weights_of",
]


@triton.jit
def finite(shift):
    """Where nothing was seen (-inf) any shift will do; -inf - (-inf) is NaN."""
    return tl.where(shift == -float("inf"), 0.0, shift)


@triton.jit
def rows_of(pointer, tokens, known, width, BLOCK: tl.constexpr):
    """Rows `tokens` of a (length, width) array as float32 (T, BLOCK); 0 where not `known`."""
    lanes = tl.arange(0, BLOCK)
    here = known[:, None] & (lanes < width)[None, :]
    return tl.load(pointer + tokens[:, None] * width + lanes[None, :], mask=here, other=0.0).to(tl.float32)


@triton.jit
def weights_of(weight, features, M, D, BD: tl.constexpr):
    """Rows `features` of the projection (BM, BD)."""
    return rows_of(weight, features, features < M, D, BD)


@triton.jit
def log_features(x, w, bias, features, M):
    """x w^T + bias (T, BM); -inf beyond the last feature."""
    known = features < M
    b = tl.load(bias + features, mask=known, other=0.0)
    logs = tl.dot(x, tl.trans(w), input_precision="ieee") + b[None, :]
    return tl.where(known[None, :], logs, -float("inf"))


@triton.jit
def chunk_keys(k, mask, tilt, tokens, length, square, D, BD: tl.constexpr, MASKED: tl.constexpr):
    """A chunk of keys (T, BD), which of them are real, and their share of the log features, square |k|^2 + tilt . k."""
    real = tokens < length
    if MASKED:
        real = real & (tl.load(mask + tokens, mask=real, other=0) != 0)
    x = rows_of(k, tokens, real, D, BD)
    lanes = tl.arange(0, BD)
    lean = tl.load(tilt + lanes, mask=lanes < D, other=0.0)
    return x, real, square * tl.sum(x * x, axis=1) + tl.sum(x * lean[None, :], axis=1)


@triton.jit
def absorb_pieces(
    k, v, mask, weight, bias, tilt, sums, totals, maxima,
    length, heads, pieces, span, M, D, E, weight_head, bias_head, tilt_head, square,
    T: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Grid (pieces, blocks of features, B H): what a piece of `span` chunks leaves in an empty state."""
    piece, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    features = tl.program_id(1) * BM + tl.arange(0, BM)
    head = row % heads
    w = weights_of(weight + head * weight_head, features, M, D, BD)
    c = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    kept = tl.zeros((BM, BE), tl.float32)
    for i in range(span):
        tokens = (piece * span + i) * T + tl.arange(0, T)
        x, real, level = chunk_keys(
            k + row * length * D, mask + (row // heads) * length, tilt + head * tilt_head,
            tokens, length, square, D, BD, MASKED,
        )  # fmt: skip
        logs = log_features(x, w, bias + head * bias_head, features, M) + level[:, None]
        logs = tl.where(real[:, None], logs, -float("inf"))
        values = rows_of(v + row * length * E, tokens, real, E, BE)
        new = tl.maximum(c, tl.max(logs, axis=0))
        phi = tl.exp(logs - finite(new)[None, :])
        rho = tl.exp(c - finite(new))
        kept = kept * rho[:, None] + tl.dot(tl.trans(phi), values, input_precision="ieee")
        total = total * rho + tl.sum(phi, axis=0)
        c = new
    slot = (row * pieces + piece) * M + features
    lanes = tl.arange(0, BE)
    known = features < M
    tl.store(sums + slot[:, None] * E + lanes[None, :], kept, mask=known[:, None] & (lanes < E)[None, :])
    tl.store(totals + slot, total, mask=known)
    tl.store(maxima + slot, c, mask=known)


@triton.jit
def scan_pieces(
    sums, totals, maxima, s_in, z_in, c_in, s_out, z_out, c_out, pieces, M, E,
    BM: tl.constexpr, BE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of features, B H): pieces joined in order. KEEP: each piece's slot receives the state before it."""
    row = tl.program_id(1).to(tl.int64)
    features = tl.program_id(0) * BM + tl.arange(0, BM)
    lanes = tl.arange(0, BE)
    known = features < M
    here = known[:, None] & (lanes < E)[None, :]
    at = row * M + features
    kept = tl.load(s_in + at[:, None] * E + lanes[None, :], mask=here, other=0.0)
    total = tl.load(z_in + at, mask=known, other=0.0)
    c = tl.load(c_in + at, mask=known, other=-float("inf"))
    for piece in range(pieces):
        slot = (row * pieces + piece) * M + features
        cell = slot[:, None] * E + lanes[None, :]
        s_new = tl.load(sums + cell, mask=here, other=0.0)
        z_new = tl.load(totals + slot, mask=known, other=0.0)
        c_new = tl.load(maxima + slot, mask=known, other=-float("inf"))
        if KEEP:
            tl.store(sums + cell, kept, mask=here)
            tl.store(totals + slot, total, mask=known)
            tl.store(maxima + slot, c, mask=known)
        top = tl.maximum(c, c_new)
        mine, theirs = tl.exp(c - finite(top)), tl.exp(c_new - finite(top))
        kept = kept * mine[:, None] + s_new * theirs[:, None]
        total = total * mine + z_new * theirs
        c = top
    tl.store(s_out + at[:, None] * E + lanes[None, :], kept, mask=here)
    tl.store(z_out + at, total, mask=known)
    tl.store(c_out + at, c, mask=known)


@triton.jit
def attend_rows(
    q, k, v, mask, weight, bias, tilt, sums, totals, maxima, out, log_normaliser, exact,
    length, heads, groups, slots, chunks, M, D, E, weight_head, bias_head, tilt_head, square,
    T: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of queries, B Hq): rows over the state in their slot and, causal, over the keys of their chunk."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pair = row // groups  # (batch, key head)
    head = pair % heads
    slot = (pair * slots + (chunk if CAUSAL else 0)) * M
    order = tl.arange(0, T)
    tokens = chunk * T + order
    lanes = tl.arange(0, BE)
    x = rows_of(q + row * length * D, tokens, tokens < length, D, BD)
    w_head, b_head = weight + head * weight_head, bias + head * bias_head
    if CAUSAL:
        y, real, level = chunk_keys(
            k + pair * length * D, mask + (pair // heads) * length, tilt + head * tilt_head,
            tokens, length, square, D, BD, MASKED,
        )  # fmt: skip
        values = rows_of(v + pair * length * E, tokens, real, E, BE)

    # The shift of each row: an upper bound of its largest log weight.
    shift = tl.full((T,), -float("inf"), tl.float32)
    past = tl.full((T,), -float("inf"), tl.float32)  # of the state, the same for every row
    for first in range(0, M, BM):
        features = first + tl.arange(0, BM)
        w = weights_of(w_head, features, M, D, BD)
        c = tl.load(maxima + slot + features, mask=features < M, other=-float("inf"))
        past = tl.maximum(past, tl.max(c, axis=0))
        if CAUSAL:
            keys = tl.where(real[:, None], log_features(y, w, b_head, features, M) + level[:, None], -float("inf"))
            c = tl.maximum(c, tl.max(keys, axis=0))
        shift = tl.maximum(shift, tl.max(log_features(x, w, b_head, features, M) + c[None, :], axis=1))
    shift = finite(shift)
    numerator = tl.zeros((T, BE), tl.float32)
    total = tl.zeros((T,), tl.float32)
    scores = tl.zeros((T, T), tl.float32)
    for first in range(0, M, BM):
        features = first + tl.arange(0, BM)
        known = features < M
        w = weights_of(w_head, features, M, D, BD)
        queries = log_features(x, w, b_head, features, M)
        c = tl.load(maxima + slot + features, mask=known, other=-float("inf"))
        z = tl.load(totals + slot + features, mask=known, other=0.0)
        s = rows_of(sums + slot * E, features, known, E, BE)
        a = tl.exp(queries + c[None, :] - shift[:, None])
        numerator += tl.dot(a, s, input_precision="ieee")
        total += tl.sum(a * z[None, :], axis=1)
        if CAUSAL:
            keys = tl.where(real[:, None], log_features(y, w, b_head, features, M) + level[:, None], -float("inf"))
            top = finite(tl.max(keys, axis=0))
            phi = tl.exp(keys - top[None, :])
            scores += tl.dot(tl.exp(queries + top[None, :] - shift[:, None]), tl.trans(phi), input_precision="ieee")
    if CAUSAL:
        visible = order[:, None] >= order[None, :]
        scores = tl.where(visible, scores, 0.0)
        numerator += tl.dot(scores, values, input_precision="ieee")
        total += tl.sum(scores, axis=1)
        # A row that sees no key has a normaliser of 0, correctly. Comparisons with NaN are false, so NaN is not sound.
        sees = (tokens < length) & ((tl.cumsum(real.to(tl.int32), axis=0) > 0) | (past > -float("inf")))
        sound = ((total >= 1e-20) | (sees == 0)) & (tl.sum(numerator, axis=1) * 0.0 == 0.0)
        redo = tl.max(tl.where(sound, 0, 1), axis=0)
        tl.store(exact + row * chunks + chunk, redo)
        if redo > 0:
            shift = tl.full((T,), -float("inf"), tl.float32)
            for first in range(0, M, BM):
                features = first + tl.arange(0, BM)
                w = weights_of(w_head, features, M, D, BD)
                queries = log_features(x, w, b_head, features, M)
                keys = tl.where(real[:, None], log_features(y, w, b_head, features, M) + level[:, None], -float("inf"))
                c = tl.load(maxima + slot + features, mask=features < M, other=-float("inf"))
                shift = tl.maximum(shift, tl.max(queries + c[None, :], axis=1))
                for j in range(T):
                    key = tl.sum(tl.where((order == j)[:, None], keys, 0.0), axis=0)
                    largest = tl.max(queries + key[None, :], axis=1)
                    shift = tl.where(order >= j, tl.maximum(shift, largest), shift)
            shift = finite(shift)
            numerator = tl.zeros((T, BE), tl.float32)
            total = tl.zeros((T,), tl.float32)
            for first in range(0, M, BM):
                features = first + tl.arange(0, BM)
                known = features < M
                w = weights_of(w_head, features, M, D, BD)
                queries = log_features(x, w, b_head, features, M)
                keys = tl.where(real[:, None], log_features(y, w, b_head, features, M) + level[:, None], -float("inf"))
                c = tl.load(maxima + slot + features, mask=known, other=-float("inf"))
                z = tl.load(totals + slot + features, mask=known, other=0.0)
                s = rows_of(sums + slot * E, features, known, E, BE)
                a = tl.exp(queries + c[None, :] - shift[:, None])
                numerator += tl.dot(a, s, input_precision="ieee")
                total += tl.sum(a * z[None, :], axis=1)
                for j in range(T):
                    key = tl.sum(tl.where((order == j)[:, None], keys, 0.0), axis=0)
                    value = tl.sum(tl.where((order == j)[:, None], values, 0.0), axis=0)
                    after = order >= j
                    logs = tl.where(after[:, None], queries + key[None, :] - shift[:, None], -float("inf"))
                    share = tl.sum(tl.exp(logs), axis=1)
                    numerator += tl.where(after[:, None], share[:, None] * value[None, :], 0.0)
                    total += share
    empty = total == 0.0
    divided = tl.where(empty[:, None], 0.0, numerator / tl.where(empty, 1.0, total)[:, None])
    here = (tokens < length)[:, None] & (lanes < E)[None, :]
    tl.store(out + row * length * E + tokens[:, None] * E + lanes[None, :], divided, mask=here)
    # +inf for rows without keys: every weight e^{log - inf} of the backward is then 0.
    level_out = tl.where(empty, float("inf"), shift + tl.log(tl.where(empty, 1.0, total)))
    tl.store(log_normaliser + row * length + tokens, level_out, mask=tokens < length)
