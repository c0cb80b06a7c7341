"""transformers' Trainer: it learns, redraws on schedule, and resumes exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import subquad as sq
from subquad.hf import (
    RedrawCallback,
    SubquadConfig,
    SubquadForCausalLM,
    SubquadForCTC,
    SubquadForSequenceClassification,
    SubquadForTokenClassification,
)


def model(dropout: float = 0.1) -> SubquadForCausalLM:
    torch.manual_seed(0)
    config = SubquadConfig(layers=2, heads=2, dim=16, vocab=7, mechanism="performer", seed=0, dropout=dropout)
    return SubquadForCausalLM(config)


def texts(count: int = 32) -> list[dict[str, torch.Tensor]]:
    """Counting upwards modulo 7 from a random number: the next token follows from the last."""
    starts = torch.randint(0, 7, (count,), generator=torch.Generator().manual_seed(3))
    rows = (starts[:, None] + torch.arange(12)) % 7
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(where: Path, trained: Any, steps: int, data: Any = None, **more: Any) -> Trainer:
    options = {"save_strategy": "no", "learning_rate": 1e-2, "per_device_train_batch_size": 4, **more}
    callbacks = options.pop("callbacks", [])
    arguments = TrainingArguments(
        output_dir=str(where), max_steps=steps, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1,
        seed=1, **options,
    )  # fmt: skip
    return Trainer(trained, arguments, train_dataset=data or texts(), callbacks=callbacks)


def draws(trained: Any) -> list[int]:
    return [m.feature_map.projection.draw_key()[1] for m in trained.model.stack.mechanisms()]


def test_it_learns_with_gradient_checkpointing(tmp_path):
    made = trainer(tmp_path, model(0.0), 60, gradient_checkpointing=True)
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert losses[0] > 1.8
    assert losses[-1] < 0.2
    assert made.model.is_gradient_checkpointing
    ids = made.model.generate(torch.tensor([[3, 4]]), max_new_tokens=6, do_sample=False)
    assert ids.tolist() == [[3, 4, 5, 6, 0, 1, 2, 3]]


def classes(kind: Any) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """A classifier of sequences or tokens; of tokens, each sequence has another number of labels."""
    torch.manual_seed(0)
    made = kind(SubquadConfig(kind="encoder", layers=1, heads=2, dim=16, vocab=7, mechanism="linear", num_labels=7))
    rows = texts()
    for number, row in enumerate(rows):
        real = torch.arange(12) <= number % 12
        row["labels"] = (
            row["labels"].masked_fill(~real, -100) if kind is SubquadForTokenClassification else row["labels"][0]
        )
    return made, rows


@pytest.mark.parametrize(
    "made",
    [
        lambda: (model(0.0), texts()),
        lambda: classes(SubquadForSequenceClassification),
        lambda: classes(SubquadForTokenClassification),
    ],
    ids=["causal", "sequences", "tokens"],
)
def test_accumulated_steps_equal_one_large_batch(tmp_path, made):
    results, losses = [], []
    for size, accumulated in ((8, 1), (2, 4)):
        trained, rows = made()
        run = trainer(
            *(tmp_path, trained, 3, rows), per_device_train_batch_size=size, gradient_accumulation_steps=accumulated,
            optim="sgd", learning_rate=0.1, max_grad_norm=0.0,  # the size of gradients counts
        )  # fmt: skip
        run.train()
        results.append([p.detach().clone() for p in trained.parameters()])
        losses.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for large, small in zip(*results, strict=True):
        torch.testing.assert_close(large, small, atol=1e-5, rtol=1e-3)


def test_redraws_on_schedule_and_resumes_exactly(tmp_path):
    whole = trainer(tmp_path / "whole", model(), 7, callbacks=[RedrawCallback(every=3)])
    whole.train()
    assert draws(whole.model) == [2, 2]
    first = trainer(
        tmp_path / "parts", model(), 7, callbacks=[RedrawCallback(every=3)], save_strategy="steps", save_steps=4
    )
    first.train()
    # A fresh process would begin like this; steps 5 to 7 are done again from the checkpoint of step 4.
    other = model()
    second = trainer(tmp_path / "parts", other, 7, callbacks=[RedrawCallback(every=3)])
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-4"))
    assert draws(other) == [2, 2]
    for (name, x), y in zip(whole.model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(x, y), name
    saved = SubquadForCausalLM.from_pretrained(tmp_path / "parts" / "checkpoint-4")
    assert draws(saved) == [1, 1]


def test_without_a_redraw_nothing_is_drawn_again(tmp_path):
    made = trainer(tmp_path, model(), 4)
    made.train()
    assert draws(made.model) == [0, 0]


def test_speech_trains(tmp_path):
    torch.manual_seed(0)
    config = SubquadConfig(
        kind="encoder", layers=1, heads=2, dim=16, mechanism="linear", frame_width=6, frame_stack=2, num_labels=4
    )
    codes = torch.randn(4, 6)
    rows = []
    for seed in range(16):
        labels = torch.randint(1, 4, (3,), generator=torch.Generator().manual_seed(seed))
        # A silence between sounds, so that two equal ones can be told apart.
        spoken = torch.stack([torch.zeros_like(labels), labels], 1).flatten().repeat_interleave(4)
        rows.append({"input_features": codes[spoken], "labels": labels})
    made = trainer(tmp_path, SubquadForCTC(config), 150, data=rows, learning_rate=2e-2)
    made.train()
    made.model.eval()
    x = torch.stack([row["input_features"] for row in rows])
    best = made.model(x).logits.argmax(-1)
    right = 0
    for path, row in zip(best, rows, strict=True):
        kept = [int(a) for a, b in zip(path, [-1, *path[:-1].tolist()], strict=True) if int(a) != b and int(a) != 0]
        right += kept == row["labels"].tolist()
    assert right >= 15


def test_wrong_schedules():
    with pytest.raises(ValueError, match="every must be at least 1"):
        RedrawCallback(every=0)
    callback = RedrawCallback(every=2)
    with pytest.raises(TypeError, match=r"redraw\(\) method"):
        callback.on_train_begin(None, type("State", (), {"global_step": 0})(), None, model=torch.nn.Linear(1, 1))
    inner = sq.nn.TransformerDecoder(layers=1, heads=2, dim=8, vocab=5, mechanism="performer")
    wrapped = torch.nn.Module()
    wrapped.module = inner
    callback.on_train_begin(None, type("State", (), {"global_step": 2})(), None, model=wrapped)
    callback.on_step_begin(None, None, None)
    assert inner.mechanisms()[0].feature_map.projection.draw_key()[1] == 1
