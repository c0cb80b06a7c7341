"""Which mechanisms there are. Being listed here is what makes one public and puts it under the contract tests."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import checks
from .base import Mechanism
from .clustered import Clustered, ImprovedClustered
from .efficient import Efficient
from .head_groups import HeadGroups
from .hedgehog import Hedgehog
from .hybrid import Hybrid
from .kernelised import Kernelised
from .linear import LinearAttention
from .linformer import Linformer
from .local import Local
from .lsh import LSH
from .multipole import Multipole
from .nystrom import Nystrom
from .performer import Performer
from .separable_linformer import SeparableLinformer
from .softmax import Softmax
from .sparse import Sparse
from .taylor import Taylor

__all__ = ["COMBINED", "MECHANISMS", "Kernelised", "Mechanism", "attention", "create", "describe", "list_mechanisms"]

MECHANISMS: dict[str, type[Mechanism]] = {
    "clustered": Clustered,
    "efficient": Efficient,
    "hedgehog": Hedgehog,
    "hybrid": Hybrid,
    "improved-clustered": ImprovedClustered,
    "linear": LinearAttention,
    "linformer": Linformer,
    "local": Local,
    "lsh": LSH,
    "multipole": Multipole,
    "nystrom": Nystrom,
    "performer": Performer,
    "separable-linformer": SeparableLinformer,
    "softmax": Softmax,
    "sparse": Sparse,
    "taylor": Taylor,
}


# Made of other mechanisms, which have to be named: left out of `list_mechanisms`, but created and tested like the rest.
COMBINED: dict[str, type[Mechanism]] = {"head-groups": HeadGroups}


_CALL_ARGUMENTS = ("is_causal", "scale", "key_mask", "query_mask", "attn_mask", "backend", "chunk_size")


def _lookup(name: object) -> type[Mechanism]:
    if isinstance(name, type) and issubclass(name, Mechanism):
        if not hasattr(name, "name"):
            raise TypeError(f"mechanism must be complete, got the base class {name.__name__}; give a class below it")
        return name
    if not isinstance(name, str):
        raise TypeError(f"mechanism must be a name, a Mechanism class or a Mechanism object, got {type(name).__name__}")
    if name in COMBINED:
        return COMBINED[name]
    if name not in MECHANISMS:
        hint = checks.nearest(name, MECHANISMS)
        raise ValueError(f"mechanism {name!r} is not known; expected one of {sorted(MECHANISMS)}{hint}")
    return MECHANISMS[name]


def create(
    mechanism: str | Mechanism | type[Mechanism],
    head_dim: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    **options: Any,
) -> Mechanism:
    """A mechanism by name: an `nn.Module` that is called as attn(q, k, v). It has no projections of q, k, v of its own.

    mechanism:       one of `list_mechanisms()`, a `Mechanism` class, or an object, which is returned as it is
    head_dim:        D, the width of a head
    heads, kv_heads: needed where parameters are per head; kv_heads < heads for grouped-query heads
    options:         those of the mechanism, see `describe(name)["options"]`

    `create("auto", head_dim, length=...)` measures once on this machine from which length on a mechanism is faster
    (`above="multipole"`, with its options). It returns softmax for shorter lengths and that mechanism otherwise.

    >>> import torch, subquad as sq
    >>> attn = sq.create("performer", head_dim=64, num_features=256, seed=0)
    >>> attn(*torch.randn(3, 1, 8, 128, 64)).shape
    torch.Size([1, 8, 128, 64])
    """
    if isinstance(mechanism, Mechanism):
        if options:
            raise TypeError(f"{mechanism.name} is an object already; options {sorted(options)} cannot be changed")
        if head_dim is not None and mechanism.head_dim != head_dim:
            raise ValueError(f"the mechanism given has head_dim={mechanism.head_dim}, here {head_dim} is needed")
        for argument, wanted, has in (("heads", heads, mechanism.heads), ("kv_heads", kv_heads, mechanism.kv_heads)):
            if wanted is not None and has is not None and wanted != has:
                raise ValueError(f"the mechanism given has {argument}={has}, here {wanted} is needed")
        return mechanism
    if mechanism == "auto":
        if head_dim is None or "length" not in options:
            raise TypeError("create('auto') needs head_dim= and length=, the length to choose a mechanism for")
        from ..planning.crossover import resolve_auto

        return resolve_auto(head_dim, heads, kv_heads, **options)
    cls = _lookup(mechanism)
    if head_dim is None:
        raise TypeError(f"create({cls.name!r}) needs head_dim=, the width of a head")
    options = cls.without_aliases(options)
    checks.check_options(f"mechanism {cls.name!r}", options, cls.options(), of_call=_CALL_ARGUMENTS)
    return cls(head_dim, heads, kv_heads, **options)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism | type[Mechanism] = "multipole",
    *,
    is_causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attention in one call: q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, Hq, L, E).

    mechanism: `multipole` is the closest to softmax attention without training; see `list_mechanisms`

    A mechanism is made at every call; for a model, `create` it once. Without a `seed` option random mechanisms draw a
    new projection at every call. Further options are those of the mechanism.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 2, 4, 16, 8)
    >>> sq.attention(q, k, v, "linear", is_causal=True).shape
    torch.Size([2, 4, 16, 8])
    """
    checks.check_attention(
        q, k, v, head_dim=q.shape[-1] if isinstance(q, Tensor) and q.dim() else 0, heads=None, kv_heads=None
    )
    if isinstance(mechanism, Mechanism):
        made = create(mechanism, **options)
    else:
        made = create(mechanism, q.shape[-1], q.shape[1], k.shape[1], **options).to(q.device)
    return made(  # type: ignore[no-any-return]
        q, k, v, is_causal=is_causal, scale=scale, key_mask=key_mask, query_mask=query_mask
    )


def list_mechanisms(
    *,
    causal: bool | None = None,
    recurrent: bool | None = None,
    constant_memory: bool | None = None,
    exact: bool | None = None,
    kernelised: bool | None = None,
) -> list[str]:
    """The names of all mechanisms, or of those with the given properties.

    causal:          has a causal form (`is_causal=True`)
    recurrent:       has a `scan`
    constant_memory: its state does not grow with the context, with its default options (`multipole` can be made so:
                     `memory="constant"`)
    exact:           equals softmax attention
    kernelised:      is a feature map and a sum

    >>> import subquad as sq
    >>> "performer" in sq.list_mechanisms(causal=True, recurrent=True)
    True
    >>> sorted(set(sq.list_mechanisms(recurrent=True)) - set(sq.list_mechanisms(constant_memory=True)))
    ['multipole', 'softmax']
    """
    wanted = {
        "causal": causal,
        "recurrent": recurrent,
        "constant_memory": constant_memory,
        "exact": exact,
        "kernelised": kernelised,
    }
    for fact, value in wanted.items():
        if value is not None:
            checks.check_flag(fact, value)
    return sorted(
        name
        for name, cls in MECHANISMS.items()
        if all(value is None or getattr(cls, fact) == value for fact, value in wanted.items())
    )


def describe(mechanism: str | Mechanism | type[Mechanism]) -> dict[str, Any]:
    """Name, equation, paper, complexity, the properties that `list_mechanisms` selects by, and options with defaults.

    >>> import subquad as sq
    >>> sq.describe("linear")["paper"]
    'Katharopoulos et al., "Transformers are RNNs", 2020'
    """
    # Of an object its own facts: options may decide them.
    known = mechanism if isinstance(mechanism, Mechanism) else _lookup(mechanism)
    return {
        "name": known.name,
        "equation": known.equation,
        "paper": known.paper,
        "complexity": known.complexity,
        "causal": known.causal,
        "recurrent": known.recurrent,
        "constant_memory": known.constant_memory,
        "exact": known.exact,
        "kernelised": known.kernelised,
        "options": known.options(),
    }
