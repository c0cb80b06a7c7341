"""Associative recall: every question has its answer in the sequence, and the state is counted as it is."""

import math
from pathlib import Path

import pytest
import torch

from subquad.tasks.base import IGNORED, generator_for
from subquad.tasks.recall import Recall, state_bytes
from subquad.train import Run, Running, train

TASK = Recall(length=40, pairs=10, vocab=30)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_questions_have_their_answer_before_them_and_no_others_are_asked(split: str) -> None:
    examples = TASK.examples(split)
    seen = set()
    for index in range(60):
        item = examples.item(index, generator_for(split, 0, index))
        tokens, targets, count = item["tokens"].tolist(), item["targets"].tolist(), int(item["pairs"])
        seen.add(count)
        assert len(tokens) == 40
        answers = dict(zip(tokens[: 2 * count : 2], tokens[1 : 2 * count : 2], strict=True))
        assert len(answers) == count == item["weight"]
        assert all(key < 15 for key in answers) and all(value >= 15 for value in answers.values())
        asked = {place: target for place, target in enumerate(targets) if target != IGNORED}
        assert min(asked) >= 2 * count
        assert sorted(tokens[place] for place in asked) == sorted(answers)
        assert all(answers[tokens[place]] == target for place, target in asked.items())
        # Keys of this sequence stand nowhere else: a question that does not count would teach nothing but noise.
        assert sum(token in answers for token in tokens) == 2 * count
    assert seen == {4, 8, 10}


def test_accuracy_by_the_number_of_pairs_adds_up(tmp_path: Path) -> None:
    settings = {"steps": 2, "batch": 4, "valid_examples": 9}
    run = Run.of(TASK, "linear", model={"dim": 16}, settings=settings)
    outcome = train(run, tmp_path, running=Running(tensorboard=False))
    figures = outcome.metrics
    weights = {4: 12, 8: 24, 10: 30}  # three sequences of each
    mean = sum(figures[f"accuracy_{n}"] * weight for n, weight in weights.items()) / sum(weights.values())
    assert figures["accuracy"] == pytest.approx(mean)
    assert outcome.artefacts["state_bytes"] > 0


def test_the_state_grows_for_softmax_alone() -> None:
    def size(mechanism: object, length: int) -> int | None:
        model = TASK.build(
            {"layers": 2, "heads": 1, "dim": 16, "mechanism": mechanism, "positions": "rotary", "seed": 0}
        )
        return state_bytes(model.eval().backbone, torch.zeros(1, length, dtype=torch.int64))

    few, many = (size("softmax", n) for n in (10, 40))
    assert few is not None and many is not None
    # Two layers, a key and a value of 16 floats per token; a few counters on top.
    assert many - few == pytest.approx(30 * 2 * 2 * 16 * 4, rel=0.2)
    assert size({"mechanism": "performer", "num_features": 8}, 10) == size(
        {"mechanism": "performer", "num_features": 8}, 40
    )
    assert size("lsh", 10) is None


def test_what_has_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="length=40 has no room for pairs=11"):
        Recall(length=40, pairs=11)
    with pytest.raises(ValueError, match="vocab=20 has 10 keys for pairs=10"):
        Recall(length=40, pairs=10, vocab=20)
    assert math.isclose(Recall().length, 4 * Recall().pairs)
