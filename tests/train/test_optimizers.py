"""Every optimiser trains, and resumes to the same bits; Lion is its paper's."""

import shutil
from pathlib import Path

import pytest
import torch

from subquad.train import train
from subquad.train.optimizers import Lion, make_optimizer
from subquad.train.settings import OPTIMIZERS, Settings

from .tiny_runs import QUICK, tensors, tiny


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_and_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    run = tiny(optimizer=name, lr=1e-3)
    train(run, tmp_path, running=QUICK)
    first, last = tensors(tmp_path, 0), tensors(tmp_path, 6)
    assert any(not torch.equal(x, last[key]) for key, x in first.items())
    shutil.rmtree(tmp_path / "checkpoints/step-00000006")
    shutil.rmtree(tmp_path / "checkpoints/step-00000004")
    train(run, tmp_path, running=QUICK, resume=True)
    assert all(torch.equal(x, last[key]) for key, x in tensors(tmp_path, 6).items())


def test_weight_decay_is_off_where_it_would_be_added_to_the_gradient() -> None:
    """There it is a penalty that Adam's normalisation makes large: small gradients would be all decay."""
    found = {name: Settings(optimizer=name).weight_decay for name in OPTIMIZERS}
    assert found == {"adamw": 0.01, "adam": 0.0, "radam": 0.01, "nadam": 0.01, "lion": 0.01, "sgd": 0.0}
    assert Settings(optimizer="adam", weight_decay=0.1).weight_decay == 0.1
    assert Settings.from_dict(Settings(optimizer="sgd").to_dict()).weight_decay == 0.0


def test_the_names_are_different_optimizers() -> None:
    model = torch.nn.Linear(2, 2)
    kinds = [type(make_optimizer(model, Settings(optimizer=name))) for name in OPTIMIZERS]
    assert len(set(kinds)) == len(OPTIMIZERS)


def test_lion_is_the_sign_of_an_interpolated_momentum() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64))
    optimizer = Lion([weight], lr=0.01, betas=(0.9, 0.98), weight_decay=0.1)
    w, m = weight.detach().clone(), torch.zeros(5, dtype=torch.float64)
    for _ in range(4):
        weight.grad = torch.randn(5, generator=generator, dtype=torch.float64)
        optimizer.step()
        w = w - 0.01 * (torch.sign(0.9 * m + 0.1 * weight.grad) + 0.1 * w)
        m = 0.98 * m + 0.02 * weight.grad
        torch.testing.assert_close(weight.detach(), w, rtol=0, atol=1e-15)
    assert optimizer.step(lambda: 3.0) == 3.0
