"""Error studies: the curves, the baselines beside them, and the inputs they are made on."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from subquad.cli import _application
from subquad.lab import error_study, error_table, gaussian_inputs, read_inputs


def small(**law):
    inputs = gaussian_inputs(128, heads=1, head_dim=16, **{"std": 0.3, **law})
    return inputs.q, inputs.k


def test_every_baseline_beside_the_curves():
    study = error_study(
        *small(), features=["hyperbolic"], projections=["gaussian", "orthogonal"], num_features=[64, 512]
    )
    assert [line.label for line in study.lines] == ["hyperbolic gaussian", "hyperbolic orthogonal"]
    assert list(study.baselines) == ["uniform", "degree-1", "hermite-2", "taylor-2"]
    for line in study.lines:
        few, many = line.points
        assert many.measured < few.measured / 3
        assert many.draws == 8
        assert many.deviation > 0
    text = error_table(study)
    for name in study.baselines:
        assert f"\n{name}" in text
    json.dumps(study.as_dict(), allow_nan=False)


def test_what_has_no_features():
    mechanisms = ["local", {"mechanism": "nystrom", "landmarks": 16}, "softmax", "linear"]
    study = error_study(*small(), features=["positive"], projections=["hadamard-1"], mechanisms=mechanisms,
                        num_features=[8, 16], draws=2)  # fmt: skip
    _, local, nystrom, softmax, linear = study.lines
    assert (local.size, [point.size for point in local.points]) == ("window", [8, 16])
    assert (nystrom.size, len(nystrom.points)) == (None, 1)
    assert softmax.points[0].measured < 1e-10
    assert "function of its own" in linear.note
    assert "local (window=M)" in error_table(study)
    alone = error_study(*small(), features=[], mechanisms=["taylor"])
    assert "M=" not in error_table(alone)  # nothing varies


def test_calibration_on_other_data_and_modifiers():
    q, k = small(anisotropy=1.0)
    other = small(anisotropy=1.0, seed=5)
    own = error_study(q, k, features=["sderf+antithetic+center"], num_features=[64], draws=4)
    fresh = error_study(q, k, features=["sderf+antithetic+center"], num_features=[64], draws=4, calibration=other)
    assert own.settings["calibrated_on"] != fresh.settings["calibrated_on"]
    assert own.lines[0].points[0].measured != fresh.lines[0].points[0].measured
    assert own.lines[0].options["center"] is True


def test_values_change_the_criterion():
    q, k = small()
    v = torch.randn(1, 1, 128, 8) + 10.0
    study = error_study(q, k, v, features=["positive"], num_features=[64], draws=2)
    assert study.criterion == "output"
    assert study.baselines["uniform"] < 0.01


def test_interrupted_keeps_what_there_is():
    def stop(line, done, total):
        raise KeyboardInterrupt

    study = error_study(*small(), features=["positive", "trig"], num_features=[16], draws=1, on_line=stop)
    assert (len(study.lines), study.complete) == (1, False)
    assert "Interrupted" in error_table(study)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": ["positiv"]}, "did you mean 'positive'"),
        ({"features": ["sderf+centre"]}, "did you mean 'center'"),
        ({"projections": ["hadamard"]}, "hadamard-3"),
        ({"mechanisms": ["perfomer"]}, "did you mean 'performer'"),
        ({"num_features": []}, "positive numbers"),
        ({"num_features": [15], "features": ["trig"]}, "must be even"),
        ({"draws": 0}, "draws must be at least 1"),
    ],
)
def test_wrong_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        error_study(*small(), **arguments)


def test_the_law_of_synthetic_inputs():
    inputs = gaussian_inputs(4000, heads=1, head_dim=8, std=0.5, anisotropy=1.0)
    deviations = inputs.q[0, 0].std(0)
    assert float(inputs.k.square().mean().sqrt()) == pytest.approx(0.5, rel=0.05)
    assert float(deviations[0] / deviations[3]) == pytest.approx(4.0, rel=0.1)
    for wrong in ({"std": 0.0}, {"std": math.nan}, {"anisotropy": -1.0}, {"heads": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            gaussian_inputs(10, **wrong)


def test_a_file_of_tensors(tmp_path):
    q, k = torch.randn(2, 3, 10, 8)
    path = tmp_path / "x.safetensors"
    save_file({"layer0.q": q, "layer0.k": k.bfloat16(), "layer0.key_mask": torch.ones(1, 10)}, path)
    inputs = read_inputs(path, "layer0.")
    assert torch.equal(read_inputs(path, "layer0").q, inputs.q)
    assert inputs.q.shape == (1, 3, 10, 8)
    assert inputs.k.dtype == torch.float32
    assert inputs.key_mask.dtype == torch.bool
    with pytest.raises(ValueError, match=r"no tensor 'q' and 'k'; the file has layer0\.k"):
        read_inputs(path)
    save_file({"q": torch.randn(4), "k": k}, path)
    with pytest.raises(ValueError, match=r"'q' is \(4,\)"):
        read_inputs(path)
    path.write_text("not a tensor")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        read_inputs(path)
    with pytest.raises(ValueError, match="no such file"):
        read_inputs(tmp_path / "none")


def command(*arguments):
    return CliRunner().invoke(_application(), list(arguments))


def test_the_error_command(tmp_path):
    target = tmp_path / "error.json"
    law = ("--length", "64", "--heads", "1", "--head-dim", "8", "--num-features", "16,32", "--draws", "2")
    done = command(
        "error", "taylor", "--features", "trig", "--projections", "gaussian,simplex", *law, "--json", str(target)
    )
    assert done.exit_code == 0, done.output
    for word in ("trig gaussian", "trig simplex", "uniform", "degree-1", "taylor-2", "M=32", "std 0.5, isotropic"):
        assert word in done.output
    record = json.loads(target.read_text())
    assert [line["label"] for line in record["lines"]] == ["trig gaussian", "trig simplex", "taylor"]
    path = tmp_path / "x.safetensors"
    q, k = 0.3 * torch.randn(2, 1, 2, 50, 8)
    save_file({"q": q, "k": k}, path)
    done = command("error", "--file", str(path), "--features", "positive", *law[6:])
    assert done.exit_code == 0, done.output
    assert "x.safetensors" in done.output


@pytest.mark.parametrize(
    "arguments",
    [("--features", "nothing"), ("--file", "/no/such/file"), ("--num-features", "x"), ("--std", "-1"), ("no-such",)],
)
def test_the_error_command_refuses(arguments):
    done = command("error", *arguments)
    assert done.exit_code == 2
    assert done.exception is None or isinstance(done.exception, SystemExit)


PLAN = ("plan", "taylor", "performer", "--heads", "1", "--head-dim", "16", "--std", "0.3")


@pytest.mark.usefixtures("own_cache")
def test_the_plan_command(tmp_path, monkeypatch):
    from subquad.planning import cost

    monkeypatch.setattr(cost, "LENGTHS", (64, 128))
    monkeypatch.setattr(cost, "ROUNDS", 1)
    target = tmp_path / "plan.json"
    length = ("--length", "300", "--target-error", "0.01")
    done = command(*PLAN, *length, "--layers", "2", "--json", str(target))
    assert done.exit_code == 0, done.output
    assert "a forward pass of 2 layers, batch 1, at length 300" in done.output
    assert "the mean of all values has" in done.output
    record = json.loads(target.read_text())
    assert record["length"] == 300
    assert all(0 < time["low"] <= time["seconds"] <= time["high"] for time in record["model"]["times"])
    assert record["model"]["times"][-1]["label"] == "softmax"
    path = tmp_path / "x.safetensors"
    q, k = 2.0 * torch.randn(2, 1, 1, 100, 16)
    save_file({"q": q, "k": k}, path)
    done = command("plan", "taylor", "--file", str(path), "--causal", "--target-error", "0.01")
    assert done.exit_code == 0, done.output
    assert "softmax: no approximation reaches error" in done.output


@pytest.mark.parametrize(
    "arguments", [("--target-error", "0"), ("--time-budget", "-1"), ("linear",), ("--file", "/no/such/file")]
)
def test_the_plan_command_refuses(arguments):
    done = command(*PLAN, "--length", "64", *arguments)
    assert done.exit_code == 2
    assert "Traceback" not in done.output
