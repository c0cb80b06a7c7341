"""Distillation: losses fall, the student comes nearer to the teacher, a stopped run goes on exactly."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import BatchEncoding, BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import subquad as sq
from subquad.hf.distillation import distilling, losses
from subquad.hf.distillation.distilling import distill
from subquad.hf.distillation.losses import output_loss
from subquad.hf.distillation.trainable import attention_tensors, loss_between, trainable_buffers

SDERF = {
    "mechanism": "performer", "features": "sderf", "center": True, "antithetic": True, "num_features": 16,
    "per_head": True, "seed": 1,
}  # fmt: skip


def bert(spread=0.25):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        initializer_range=spread, max_position_embeddings=64,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False).eval()


def batches(count=3, length=24):
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        mask = torch.ones(4, length, dtype=torch.long)
        mask[2, length - 5 :] = 0
        made.append({"input_ids": torch.randint(0, 40, (4, length), generator=generator), "attention_mask": mask})
    return made


def student_of(teacher, choice=None):
    return sq.hf.convert(copy.deepcopy(teacher), choice or SDERF, calibration=batches(1))[0]


def distance(teacher, student, given):
    with torch.no_grad():
        wanted = teacher(**given).last_hidden_state
        real = given["attention_mask"].bool()
        return float((student(**given).last_hidden_state - wanted)[real].norm() / wanted[real].norm())


def test_inputs_within_the_window_teach_nothing_and_do_no_harm():
    teacher = bert()
    far = {"mechanism": "taylor", "degree": 1, "center": True}
    student = student_of(teacher, {"mechanism": "hybrid", "window": 30, "sinks": 1, "far": far})
    report = distill(teacher, student, batches(2, length=24), steps=2)
    assert len(report.attention_losses) == 2 and max(report.attention_losses) < 1e-8
    assert distance(teacher, student, batches(1, length=24)[0]) < 1e-4


@pytest.mark.parametrize(
    "choice",
    [
        SDERF,
        {"mechanism": "hybrid", "window": 2, "sinks": 1, "far": "hedgehog"},
        {"mechanism": "hybrid", "window": 2, "sinks": 1, "far": {"mechanism": "taylor", "degree": 1, "center": True}},
    ],
)
def test_matching_attention_brings_the_whole_model_nearer(choice):
    teacher = bert()
    student = student_of(teacher, choice)
    before = {name: p.clone() for name, p in student.named_parameters() if ".subquad." not in name}
    unseen = batches(5)[4]
    far = [distance(teacher, student, given) for given in [unseen, *batches(3)]]
    names = set(student.state_dict())
    report = distill(teacher, student, batches(3), steps=24, lr=1e-2)
    assert len(report.attention_losses) == 24 and not report.model_losses
    # Three batches, so the last three steps see what the first three saw.
    assert sum(report.attention_losses[-3:]) < 0.9 * sum(report.attention_losses[:3])
    near = [distance(teacher, student, given) for given in [unseen, *batches(3)]]
    assert sum(near) < sum(far)
    assert set(student.state_dict()) == names  # what was learned is where calibration was
    for name, value in before.items():
        assert torch.equal(student.get_parameter(name), value), name  # only mechanisms learn


def test_lora_matches_the_teachers_hidden_states_and_is_merged():
    teacher = bert()
    student = student_of(teacher, {"mechanism": "taylor", "degree": 1, "center": True})
    shapes = {name: p.shape for name, p in student.named_parameters()}
    weights = {name: p.clone() for name, p in student.named_parameters()}
    far = sum(distance(teacher, student, given) for given in batches(3))
    report = distill(teacher, student, batches(3), steps=0, lora_steps=30, lora_rank=4, lora_lr=5e-3)
    assert sum(report.model_losses[-3:]) < 0.9 * sum(report.model_losses[:3])
    assert sum(distance(teacher, student, given) for given in batches(3)) < far
    assert {name: p.shape for name, p in student.named_parameters()} == shapes
    changed = {name for name, p in student.named_parameters() if not torch.equal(p, weights[name])}
    assert {name.split("attention.")[1].rsplit(".", 1)[0] for name in changed} == {
        "self.query", "self.key", "self.value", "output.dense"
    }  # fmt: skip
    assert all(p.requires_grad for p in student.parameters())


def test_causal_models_are_matched_by_their_logits():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32, resid_pdrop=0.0, initializer_range=0.4
    )
    teacher = GPT2LMHeadModel(config).eval()
    student = student_of(teacher, {"mechanism": "local", "window": 2})
    report = distill(teacher, student, batches(3), steps=0, lora_steps=20, lora_rank=4, lora_lr=1e-2)
    assert report.model_losses[-1] < 0.9 * report.model_losses[0]


def test_a_stopped_run_goes_on_exactly(tmp_path):
    teacher = bert()
    call = {"steps": 6, "lora_steps": 6, "lora_rank": 2, "checkpoint_every": 2}
    whole = student_of(teacher)
    full = distill(teacher, whole, batches(), **call)

    class Stop(Exception):
        pass

    for stop_at in (3, 9):  # in the first stage, and in the second
        file = tmp_path / f"run{stop_at}.safetensors"

        def stop(text, done, total, stop_at=stop_at):
            assert total == 12
            if done == stop_at:
                raise Stop

        broken = student_of(teacher)
        with pytest.raises(Stop):
            distill(teacher, broken, batches(), checkpoint=file, progress=stop, **call)
        assert not any(".lora_" in name for name, _ in broken.named_parameters())
        resumed = student_of(teacher)
        report = distill(teacher, resumed, batches(), checkpoint=file, **call)
        assert report.resumed_at == stop_at - 1
        assert report.attention_losses == full.attention_losses
        assert report.model_losses == full.model_losses
        for name, value in whole.state_dict().items():
            assert torch.equal(resumed.state_dict()[name], value), name
        assert not file.exists()


def test_a_time_limit_keeps_what_was_learned_and_can_be_continued(tmp_path):
    teacher, file = bert(), tmp_path / "run.safetensors"
    report = distill(teacher, student_of(teacher), batches(), steps=4, seconds=1e-9, checkpoint=file)
    assert report.stopped and not report.attention_losses and file.exists()
    again = distill(teacher, student_of(teacher), batches(), steps=4, checkpoint=file)
    assert len(again.attention_losses) == 4 and not again.stopped


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    teacher, file = bert(), tmp_path / "run.safetensors"
    distill(teacher, student_of(teacher), batches(), steps=4, seconds=1e-9, checkpoint=file)
    with pytest.raises(ValueError, match=r"other settings \(steps\)"):
        distill(teacher, student_of(teacher), batches(), steps=5, checkpoint=file)
    file.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="no checkpoint"):
        distill(teacher, student_of(teacher), batches(), steps=4, checkpoint=file)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_the_same_student_goes_on_after_an_interruption(tmp_path, kind):
    """With the adapters merged into it as well, what they had learned would count twice."""
    teacher, file = bert(), tmp_path / "run.safetensors"
    call = {"steps": 2, "lora_steps": 6, "lora_rank": 2, "lora_lr": 1e-2, "checkpoint_every": 2}
    whole, student = student_of(teacher), student_of(teacher)
    full = distill(teacher, whole, batches(), **call)

    def stop(text, done, total):
        if done == 6:
            raise kind

    weights = {name: p.clone() for name, p in student.named_parameters()}
    with pytest.raises(kind):
        distill(teacher, student, batches(), checkpoint=file, progress=stop, **call)
    assert all(torch.equal(p, weights[name]) for name, p in student.named_parameters())
    assert distill(teacher, student, batches(), checkpoint=file, **call).model_losses == full.model_losses
    for name, value in whole.state_dict().items():
        assert torch.equal(student.state_dict()[name], value), name


def test_a_student_with_merged_adapters_does_not_go_on(tmp_path, monkeypatch):
    teacher, file = bert(), tmp_path / "run.safetensors"
    call = {"steps": 0, "lora_steps": 4, "lora_rank": 2, "lora_lr": 1e-2, "checkpoint": file}
    student = student_of(teacher)
    weights = {name: p.clone() for name, p in student.named_parameters()}
    turns = iter(range(9))

    def over(clock):
        clock.stopped = "after two steps" if next(turns) == 2 else ""
        return bool(clock.stopped)

    with monkeypatch.context() as patch:
        patch.setattr(distilling._Clock, "over", over)
        assert len(distill(teacher, student, batches(), seconds=1, **call).model_losses) == 2
    assert any(not torch.equal(p, weights[name]) for name, p in student.named_parameters())  # what was learned is kept
    with pytest.raises(ValueError, match=r"\(weights of the student\).* stopped by seconds= in its LoRA stage"):
        distill(teacher, student, batches(), **call)
    assert len(distill(teacher, student_of(teacher), batches(), **call).model_losses) == 4


def test_another_mechanism_or_other_batches_do_not_go_on(tmp_path):
    teacher, file = bert(), tmp_path / "run.safetensors"
    call = {"steps": 4, "checkpoint": file}
    distill(teacher, student_of(teacher), batches(), seconds=1e-9, **call)
    with pytest.raises(ValueError, match=r"other settings \(mechanisms, weights of the student\)"):
        distill(teacher, student_of(teacher, "hedgehog"), batches(), **call)
    with pytest.raises(ValueError, match=r"other settings \(batches\)"):
        distill(teacher, student_of(teacher), batches(4)[1:], **call)
    with pytest.raises(ValueError, match=r"other settings \(batches\)"):
        distill(teacher, student_of(teacher), [BatchEncoding(one) for one in batches(4)[1:]], **call)
    with pytest.raises(ValueError, match=r"other settings \(weights of the teacher\)"):
        distill(bert(0.3), student_of(teacher), batches(), **call)
    with safe_open(file, framework="pt") as stored:
        tensors, header = {name: stored.get_tensor(name) for name in stored.keys()}, stored.metadata()  # noqa: SIM118
    lost = next(name for name in tensors if name.startswith("value:"))
    save_file({name: x for name, x in tensors.items() if name != lost}, file, metadata=header)
    with pytest.raises(ValueError, match="lacks the tensor"):
        distill(teacher, student_of(teacher), batches(), **call)


def test_a_trained_student_is_saved_and_loaded(tmp_path):
    teacher = bert()
    student = student_of(teacher)
    distill(teacher, student, batches(), steps=3, lora_steps=2, lora_rank=2)
    student.save_pretrained(tmp_path)
    again = sq.hf.load(tmp_path).eval()
    with torch.no_grad():
        given = batches(1)[0]
        for name, value in student.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), name
        torch.testing.assert_close(again(**given).last_hidden_state, student(**given).last_hidden_state)


def test_buffers_are_parameters_only_inside():
    student = student_of(bert())
    names = set(dict(student.named_parameters()))
    with trainable_buffers(student):
        learned = attention_tensors(student)
        assert {name.rsplit(".", 1)[-1] for name in learned} == {"a", "matrix", "query_mean", "key_mean"}
    assert set(dict(student.named_parameters())) == names and not attention_tensors(student)


def test_padding_does_not_count_in_the_loss():
    torch.manual_seed(0)
    wanted, mask = torch.randn(2, 5, 8), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    found = wanted + 0.1 * torch.randn_like(wanted)
    garbage = torch.where(mask[..., None].bool(), found, torch.full_like(found, 99.0))
    for logits in (False, True):
        assert output_loss(found, wanted, mask, logits=logits) == output_loss(garbage, wanted, mask, logits=logits)
    assert float(output_loss(wanted, wanted, mask, logits=False)) == 0.0


def test_padding_of_what_tokenizers_give_does_not_count():
    teacher = bert()
    found = [
        distill(teacher, student_of(teacher), [kind(batches(1)[0])], steps=0, lora_steps=2).model_losses
        for kind in (dict, BatchEncoding)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", ["encoder", "decoder", "both"])
def test_padding_of_torchs_modules_does_not_count(kind, named, batch_first):
    """Masks that say what is padding, by name or by their place, also where batch and length are alike."""
    layout = {"dim_feedforward": 8, "dropout": 0.0, "batch_first": batch_first}

    def made():
        if kind == "encoder":
            return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, **layout), 1, enable_nested_tensor=False)
        if kind == "decoder":
            return nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, **layout), 1)
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, **layout), 1, enable_nested_tensor=False)
        return nn.Transformer(8, 2, num_decoder_layers=1, custom_encoder=encoder, **layout)

    teacher, student = made(), made()
    padding = torch.tensor([[False, False, True, True], [False] * 4, [False] * 3 + [True], [False] * 4])
    floats = torch.zeros(4, 4).masked_fill(padding, float("-inf"))
    source = torch.randn(4, 4, 8)

    def loss(x):
        inputs = {"src": x} if kind == "encoder" else {"tgt": x, "memory" if kind == "decoder" else "src": source}
        inputs = {name: y if batch_first else y.transpose(0, 1) for name, y in inputs.items()}
        inputs |= {"src_key_padding_mask": padding} if kind == "encoder" else {"tgt_key_padding_mask": floats}
        if kind == "both":  # whose padding is not that of the output
            inputs["src_key_padding_mask"] = padding.flip(0)
        if named:
            return losses.model_loss(teacher, student, inputs, 0, losses.TeacherCache(), None)
        places = tuple(inputs.get(name) for name in inspect.signature(teacher.forward).parameters)
        last = max(index for index, one in enumerate(places) if one is not None)
        return losses.model_loss(teacher, student, places[: last + 1], 0, losses.TeacherCache(), None)

    x = torch.randn(4, 4, 8)
    garbage = torch.where(padding[..., None], 9 * torch.randn(4, 4, 8), x)
    torch.testing.assert_close(loss(x), loss(garbage))


def test_losses_of_half_precision_models_are_not_rounded():
    torch.manual_seed(0)
    wanted = torch.randn(2, 300, 8)
    for dtype in (torch.float16, torch.bfloat16):
        exact, close = wanted.to(dtype), (wanted + 0.1 * torch.randn_like(wanted)).to(dtype)
        for logits in (False, True):
            loss = output_loss(close, exact, None, logits=logits)
            assert loss.dtype == torch.float32
            torch.testing.assert_close(loss, output_loss(close.float(), exact.float(), None, logits=logits))
        heads, weight = (close.unsqueeze(1), exact.unsqueeze(1)), torch.randn(1, 8, 8).to(dtype)
        with torch.autocast("cpu", dtype):
            loss = loss_between(*heads, weight, None)
        torch.testing.assert_close(loss, loss_between(*(x.float() for x in heads), weight.float(), None))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_learn_like_others(dtype):
    """In their own precision steps would be lost, and Adam would divide by zero."""
    found = []
    for kind in (torch.float32, dtype):
        teacher = bert().to(kind)
        student = student_of(teacher, "hedgehog")
        dtypes = {name: p.dtype for name, p in student.named_parameters()}
        found.append(distill(teacher, student, batches(), steps=6, lora_steps=6, lora_rank=2, lora_lr=5e-3))
        assert {name: p.dtype for name, p in student.named_parameters()} == dtypes
    assert found[1].attention_losses == pytest.approx(found[0].attention_losses, rel=0.01)
    assert found[1].model_losses == pytest.approx(found[0].model_losses, rel=0.02)


def test_logits_are_known_by_the_vocabulary_of_the_text_model(monkeypatch):
    """The config of a model of texts and images has it one level down."""
    asked = []
    monkeypatch.setattr(losses, "output_loss", lambda *args, logits: asked.append(logits) or torch.zeros(()))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)).eval()
    whole = torch.nn.Sequential(model)
    whole.config = SimpleNamespace(get_text_config=lambda: model.config)
    losses.model_loss(whole, whole, torch.tensor([[3, 4, 5]]), 0, losses.TeacherCache(), None)
    assert asked == [True]


def test_autocast_of_rotary_models():
    """Positions leave q and k in float32 beside values in half."""
    from .zoo import make, text

    with torch.autocast("cpu", dtype=torch.bfloat16):
        student, report = sq.hf.convert(make("llama"), "hedgehog", calibration=[text()])
        assert report.converted == [0, 1, 2]
        found = distill(make("llama"), student, [text()], steps=2, lora_steps=1)
        assert sq.hf.convert(make("llama").model, "local", window=3)[1].converted == [0, 1, 2]
    assert len(found.attention_losses) == 2 and len(found.model_losses) == 1


def test_wrong_input_is_refused():
    teacher = bert()
    with pytest.raises(ValueError, match="student is not converted"):
        distill(teacher, copy.deepcopy(teacher), batches())
    student = student_of(teacher)
    with pytest.raises(ValueError, match="teacher is converted itself"):
        distill(student, student, batches())
    with pytest.raises(ValueError, match="at least one"):
        distill(teacher, student, [])
    with pytest.raises(ValueError, match="steps must be at least 0"):
        distill(teacher, student, batches(), steps=-1)


def test_what_would_be_lost_or_not_fit_is_refused_first():
    from peft import LoraConfig, get_peft_model

    teacher = bert()
    student = get_peft_model(student_of(teacher), LoraConfig(target_modules=["query"]))
    before = {name: p.clone() for name, p in student.named_parameters()}
    with pytest.raises(ValueError, match=r"LoRA adapters of its own.*merge_and_unload"):
        distill(teacher, student, batches(), steps=0, lora_steps=1)
    assert all(torch.equal(p, before[name]) for name, p in student.named_parameters())
    deeper = BertModel(BertConfig(**{**teacher.config.to_dict(), "num_hidden_layers": 3}), add_pooling_layer=False)
    with pytest.raises(ValueError, match="the teacher has 3 attention layers, the student 2"):
        distill(deeper.eval(), student_of(teacher), batches(), steps=1)


def test_nothing_to_train_is_said():
    teacher = bert()
    with pytest.raises(ValueError, match="nothing to train: 'local' has no parameters"):
        distill(teacher, student_of(teacher, {"mechanism": "local", "window": 4}), batches(1), steps=3)
