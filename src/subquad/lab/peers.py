"""Other libraries' attention, where they are installed, called as their own documentation says.

    performer_pytorch    FastAttention: FAVOR+; causal on a CPU is its torch implementation
    fast_transformers    LinearAttention with Favor and with elu + 1, clustered and improved clustered attention (C++)
    reformer_pytorch     LSHAttention: shared queries and keys, so that its distance from softmax attention says nothing

Nothing here is a dependency: a library that is not importable is not there. What a library needs before the clock
starts (its own layout, a module, a mask) is made before; what it does per call is its time.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["PEERS", "Peer", "installed_peers"]

Call = Callable[[], Tensor]
Prepare = Callable[[Tensor, Tensor, Tensor, bool, int], Call]


@dataclass(frozen=True)
class Peer:
    """One attention of another library; `prepare(q, k, v, is_causal, num_features)` gives a call -> (B, H, L, E).

    A call that it cannot do raises ValueError. `estimates_softmax` says whether its distance from softmax means much.
    """

    name: str
    package: str
    module: str
    prepare: Prepare
    estimates_softmax: bool = True

    @property
    def version(self) -> str | None:
        """Of the installed package, None where it is not installed."""
        try:
            found = importlib.util.find_spec(self.module) is not None
            return importlib.metadata.version(self.package) if found else None
        except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError, ValueError):
            return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Libraries that are years old warn about themselves and print that there is no CUDA; both are known."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _performer_pytorch(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, num_features: int) -> Call:
    with _quiet():
        from performer_pytorch import FastAttention

        attend = FastAttention(q.shape[-1], nb_features=num_features, causal=is_causal).eval()
    return lambda: attend(q, k, v)


def _fast_transformers(kind: str, causal_kind: str | None, **options: Any) -> Prepare:
    """Its layout is (B, L, H, D); the inputs are brought into it before the clock starts."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, num_features: int) -> Call:
        with _quiet():
            from fast_transformers import attention, feature_maps
            from fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask

            chosen = causal_kind if is_causal else kind
            if chosen is None:
                raise ValueError(f"fast-transformers has no causal {kind}")
            own = {name: value for name, value in options.items() if name != "features"}
            if options.get("features") == "favor":
                own["feature_map"] = feature_maps.Favor.factory(n_dims=num_features)
            first = (q.shape[-1],) if "Linear" in chosen else ()
            attend = getattr(attention, chosen)(*first, **own).eval()
            length = q.shape[2]
            mask = TriangularCausalMask(length) if is_causal else FullMask(length)
            lengths = LengthMask(torch.full((q.shape[0],), length))
        # Its feature map is redrawn within the call, with a function of torch that warns about itself.
        warnings.filterwarnings("ignore", module="fast_transformers")
        grad = q.requires_grad
        q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_(grad) for x in (q, k, v))
        return lambda: attend(q, k, v, mask, lengths, lengths).transpose(1, 2)

    return prepare


def _reformer_pytorch(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, num_features: int) -> Call:
    batch, heads, length, width = q.shape
    if length % 128:
        raise ValueError(f"reformer-pytorch needs a multiple of 128 tokens (two buckets of 64), got {length}")
    with _quiet():
        from reformer_pytorch import LSHAttention

        attend = LSHAttention(bucket_size=64, n_hashes=4, causal=is_causal).eval()
    flat_q, flat_v = q.flatten(0, 1), v.flatten(0, 1)
    if q.requires_grad:
        flat_q, flat_v = flat_q.detach().requires_grad_(), flat_v.detach().requires_grad_()
    return lambda: attend(flat_q, flat_v)[0].view(batch, heads, length, width)


_FAST = "pytorch-fast-transformers"
PEERS: tuple[Peer, ...] = (
    Peer("performer-pytorch", "performer-pytorch", "performer_pytorch", _performer_pytorch),
    Peer(
        *("fast-transformers favor", _FAST, "fast_transformers"),
        _fast_transformers("LinearAttention", "CausalLinearAttention", features="favor"),
    ),
    Peer(
        *("fast-transformers linear", _FAST, "fast_transformers"),
        _fast_transformers("LinearAttention", "CausalLinearAttention"),
        estimates_softmax=False,
    ),
    Peer(
        *("fast-transformers clustered", _FAST, "fast_transformers"),
        _fast_transformers("ClusteredAttention", None, clusters=25),
    ),
    Peer(
        *("fast-transformers improved", _FAST, "fast_transformers"),
        _fast_transformers("ImprovedClusteredAttention", None, clusters=25),
    ),
    Peer("reformer-pytorch lsh", "reformer-pytorch", "reformer_pytorch", _reformer_pytorch, estimates_softmax=False),
)


def installed_peers() -> list[Peer]:
    """Those of PEERS whose library can be imported here.

    >>> all(peer.version for peer in installed_peers())
    True
    """
    return [peer for peer in PEERS if peer.version is not None]
