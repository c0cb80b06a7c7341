"""Other libraries: found at run time, called as they want to be; tested where they are installed, absent elsewhere."""

import sys
import types

import pytest
import torch

from subquad.lab.peers import PEERS, Peer, installed_peers


def test_what_is_not_installed_is_not_there():
    assert Peer("x", "no-such-package", "no_such_module", lambda *a: None).version is None
    # Importable, but not what it is called: a folder of that name in the current directory is no library.
    assert Peer("x", "no-such-package", "json", lambda *a: None).version is None
    assert Peer("x", "torch", "torch", lambda *a: None).version
    assert {peer.name for peer in installed_peers()} <= {peer.name for peer in PEERS}


@pytest.mark.parametrize("is_causal", [False, True])
def test_installed_peers_compute_attention(is_causal):
    """Nothing to do where none is installed; `make peers` has an environment with all of them."""
    q, k, v = 0.3 * torch.randn(3, 2, 2, 128, 16, generator=torch.Generator().manual_seed(0))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    for peer in installed_peers():
        try:
            call = peer.prepare(q, k, v, is_causal, 64)
        except ValueError as error:
            assert "no causal" in str(error)
            continue
        with torch.no_grad():
            out = call()
        assert out.shape == (2, 2, 128, 16)
        if peer.estimates_softmax:
            assert float((out - exact).norm() / exact.norm()) < 0.6, peer.name


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_is_called_with_its_own_layout(peer, monkeypatch):
    """With the library's modules replaced by what records its call: the adapter, not the library, is tested."""
    seen = []

    class Attention(torch.nn.Module):
        def __init__(self, *arguments, **options):
            super().__init__()
            self.lsh = "n_hashes" in options

        def forward(self, q, *others):
            seen.append(q.shape)
            return (q, None, None) if self.lsh else q

    class Module(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return types.SimpleNamespace(factory=lambda n_dims: n_dims) if name == "Favor" else Attention

    for name in ("performer_pytorch", "reformer_pytorch", "fast_transformers"):
        monkeypatch.setitem(sys.modules, name, Module(name))
    parts = {name: Module(f"fast_transformers.{name}") for name in ("attention", "feature_maps", "masking")}
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, f"fast_transformers.{name}", part)
        setattr(sys.modules["fast_transformers"], name, part)
    q, k, v = torch.randn(3, 2, 3, 128, 8)
    out = peer.prepare(q, k, v, False, 16)()
    assert out.shape == q.shape
    torch.testing.assert_close(out, q)
    layout = {"performer_pytorch": (2, 3, 128, 8), "reformer_pytorch": (6, 128, 8), "fast_transformers": (2, 128, 3, 8)}
    assert seen == [layout[peer.module]]


def test_reformer_says_which_lengths_it_takes():
    (reformer,) = [peer for peer in PEERS if peer.module == "reformer_pytorch"]
    q, k, v = torch.randn(3, 1, 1, 100, 8)
    with pytest.raises(ValueError, match="multiple of 128 tokens"):
        reformer.prepare(q, k, v, False, 64)
