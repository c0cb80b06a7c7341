"""A sequence cut over processes gives what one process gives: outputs, losses and gradients."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import subquad as sq

MECHANISMS: list[dict[str, Any]] = [
    {"mechanism": "linear"},
    {"mechanism": "performer", "num_features": 32, "seed": 1},
    {"mechanism": "performer", "features": "trig", "num_features": 32, "seed": 1},
    {"mechanism": "taylor", "degree": 2},
    {"mechanism": "efficient"},
    {"mechanism": "hedgehog", "heads": 4, "kv_heads": 2},
]
CAUSAL_ONLY: list[dict[str, Any]] = [
    {"mechanism": "hybrid", "window": 5, "sinks": 2, "far": {"mechanism": "performer", "num_features": 32, "seed": 1}},
    {"mechanism": "local", "window": 6},
]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 23, 8, dtype=dtype, generator=generator)
    k = torch.randn(2, 2, 23, 8, dtype=dtype, generator=generator) * 2
    v = torch.randn(2, 2, 23, 5, dtype=dtype, generator=generator)
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[0, 17:] = False  # the last piece of the first sequence is nearly all padding
    mask[1, :9] = False  # and the first piece of the second is only padding
    return q, k, v, mask


def check_attention(rank: int, world: int, configs: list[dict[str, Any]], modes: list[bool]) -> None:
    q, k, v, mask = inputs()
    weight = torch.randn(2, 4, 23, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for config in configs:
        for is_causal in modes:
            for key_mask in (None, mask):
                attn = sq.create(head_dim=8, **config).double()
                whole = [x.clone().requires_grad_() for x in (q, k, v)]
                expected = attn(*whole, is_causal=is_causal, key_mask=key_mask)
                (expected * weight).sum().backward()
                pieces = [sq.parallel.split_sequence(x, 2).clone().requires_grad_() for x in (q, k, v)]
                own_mask = None if key_mask is None else sq.parallel.split_sequence(key_mask, 1)
                out = sq.parallel.attention(attn, *pieces, is_causal=is_causal, key_mask=own_mask)
                (out * sq.parallel.split_sequence(weight, 2)).sum().backward()
                case = (config, is_causal, key_mask is not None)
                torch.testing.assert_close(
                    out,
                    sq.parallel.split_sequence(expected, 2),
                    rtol=1e-9,
                    atol=1e-9,
                    msg=lambda m, c=case: f"{c}: {m}",
                )
                for piece, x in zip(pieces, whole, strict=True):
                    torch.testing.assert_close(
                        piece.grad,
                        sq.parallel.split_sequence(x.grad, 2),
                        rtol=1e-8, atol=1e-8, msg=lambda m, c=case: f"{c}: {m}",
                    )  # fmt: skip


def test_kernelised_attention_over_three_processes_is_that_of_one(processes: Any) -> None:
    processes(3, check_attention, MECHANISMS, [False, True])


def test_causal_windows_reach_over_the_border_of_pieces(processes: Any) -> None:
    processes(3, check_attention, CAUSAL_ONLY, [True])


def check_short(rank: int, world: int) -> None:
    """Fewer tokens than processes: some pieces are empty, and yet all take part in the backward."""
    for config in ({"mechanism": "linear"}, *CAUSAL_ONLY):
        attn = sq.create(head_dim=8, **config).double()
        q, k, v = (x[:, :, :2] for x in inputs()[:3])
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = attn(*whole, is_causal=True)
        expected.square().sum().backward()
        pieces = [sq.parallel.split_sequence(x, 2).clone().requires_grad_() for x in (q, k, v)]
        out = sq.parallel.attention(attn, *pieces, is_causal=True)
        torch.testing.assert_close(sq.parallel.gather_sequence(out.detach(), 2), expected.detach())
        out.square().sum().backward()
        for piece, x in zip(pieces, whole, strict=True):
            torch.testing.assert_close(piece.grad, sq.parallel.split_sequence(x.grad, 2))


def test_pieces_may_be_empty(processes: Any) -> None:
    processes(3, check_short)


def model_and_tokens(positions: str) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    choice = [
        {"mechanism": "performer", "num_features": 16, "seed": 3},
        {"mechanism": "hybrid", "window": 4, "sinks": 1, "far": {"mechanism": "linear"}},
    ]
    limit = {"max_length": 64} if positions == "learned" else {}
    model = sq.nn.TransformerDecoder(
        layers=2, heads=2, dim=16, vocab=13, mechanism=choice, positions=positions, seed=0, **limit
    )
    return model.double(), torch.randint(0, 13, (2, 25))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def check_model(rank: int, world: int, positions: str, checkpointing: bool) -> None:
    model, tokens = model_and_tokens(positions)
    alone = copy.deepcopy(model)
    loss = loss_of(alone(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()

    model.train().checkpoint_activations(checkpointing)
    sharded = DistributedDataParallel(sq.parallel.shard_sequence(model))
    piece, target = (sq.parallel.split_sequence(x, 1) for x in (tokens[:, :-1], tokens[:, 1:]))
    own = loss_of(sharded(piece), target)  # 24 tokens over 2 or 3 processes: equal pieces, so means may be averaged
    own.backward()
    total = own.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total / world, loss.detach(), rtol=1e-9, atol=1e-9)
    for (name, mine), (_, theirs) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("positions", "checkpointing"), [("rotary", False), ("learned", True)])
def test_a_model_under_data_parallel_has_the_loss_and_gradients_of_one_process(
    processes: Any, positions: str, checkpointing: bool
) -> None:
    processes(2, check_model, positions, checkpointing)


def check_grid(rank: int, world: int) -> None:
    """Two sequences, each cut over two processes, gradients averaged over all four."""
    model, tokens = model_and_tokens("sinusoidal")
    alone = copy.deepcopy(model)
    loss_of(alone(tokens[:, :-1]), tokens[:, 1:]).backward()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    row, group = rank // 2, groups[rank // 2]
    sharded = DistributedDataParallel(sq.parallel.shard_sequence(model, group))
    mine = tokens[row : row + 1]
    piece, target = (sq.parallel.split_sequence(x, 1, group) for x in (mine[:, :-1], mine[:, 1:]))
    loss_of(sharded(piece), target).backward()
    for (name, mine_p), (_, theirs) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(mine_p.grad, theirs.grad, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_data_and_sequence_parallelism_together(processes: Any) -> None:
    processes(4, check_grid)


class Wrapped(nn.Module):
    """A model inside a module that knows nothing of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = sq.nn.TransformerEncoder(1, 2, 16, "linear", positions="sinusoidal", seed=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]


def check_positions(rank: int, world: int) -> None:
    torch.manual_seed(0)
    x, source, target = torch.randn(2, 20, 16), torch.randint(0, 13, (2, 20)), torch.randint(0, 11, (2, 20))
    cases: list[tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]] = [
        (sq.nn.MultiheadAttention(16, 2, "linear", rotary=True), (x,), {"is_causal": True}),
        (Wrapped(), (x,), {}),
        (sq.nn.EncoderDecoder(1, 2, 16, 11, "linear", source_vocab=13, seed=0), (source, target), {}),
    ]
    for module, given, call in cases:
        expected = module(*given, **call)
        sharded = sq.parallel.shard_sequence(module)
        out = sq.parallel.gather_sequence(sharded(*(sq.parallel.split_sequence(y) for y in given), **call))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5, msg=lambda m, c=module: f"{type(c)}: {m}")
        torch.testing.assert_close(sharded.release()(*given, **call), expected)


def test_positions_continue_inside_any_module(processes: Any) -> None:
    processes(2, check_positions)


def check_errors(rank: int, world: int) -> None:
    q, k, v, _ = inputs()
    pieces = [sq.parallel.split_sequence(x, 2) for x in (q, k, v)]
    with pytest.raises(ValueError, match="softmax has no state of constant size"):
        sq.parallel.attention(sq.create("softmax", head_dim=8), *pieces)
    with pytest.raises(ValueError, match=r"hybrid over a sequence .* causal only"):
        sq.parallel.attention(sq.create("hybrid", head_dim=8).double(), *pieces)
    with pytest.raises(ValueError, match="holds no subquad mechanism"):
        sq.parallel.shard_sequence(nn.Linear(2, 2))
    other = sq.create("performer", head_dim=8, num_features=16, seed=rank).double()
    with pytest.raises(ValueError, match="same seed everywhere"):
        sq.parallel.attention(other, *pieces)
    parts = [{"heads": [0], **MECHANISMS[1], "seed": rank}, {"heads": [1], "mechanism": "linear"}]
    with pytest.raises(ValueError, match="same seed everywhere"):
        sq.parallel.attention(sq.create("head-groups", 8, 4, 2, groups=parts).double(), *pieces, is_causal=True)
    model, tokens = model_and_tokens("rotary")
    before = model(tokens)
    sharded = sq.parallel.shard_sequence(model)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)
    assert torch.equal(sharded.release()(tokens), before)
    pickle.dumps(model)


def test_what_cannot_be_cut_is_refused(processes: Any) -> None:
    processes(2, check_errors)


def check_killed(rank: int, world: int) -> None:
    attn = sq.create("linear", head_dim=8).double()
    pieces = [sq.parallel.split_sequence(x, 2) for x in inputs()[:3]]
    sq.parallel.attention(attn, *pieces)
    if rank == 1:
        import os

        os._exit(0)  # as if killed: no farewell to the others
    with pytest.raises(RuntimeError, match="process 0 of 2: another process ended"):
        sq.parallel.attention(attn, *pieces)


def test_a_process_that_dies_ends_the_others_with_a_message(processes: Any) -> None:
    processes(2, check_killed)


def test_without_a_process_group_the_error_says_how_to_begin() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        sq.parallel.split_sequence(torch.zeros(1, 4))
