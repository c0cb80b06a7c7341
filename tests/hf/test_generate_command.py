"""`subquad generate` as a user meets it."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import subquad as sq
from subquad.cli import main
from subquad.train import Run, Running, load_trained, train


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = sq.hf.SubquadConfig(layers=1, heads=2, dim=16, vocab=256, mechanism="performer", seed=0)
    sq.hf.SubquadForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    out, err, before = io.StringIO(), io.StringIO(), (sys.stdin, logging.get_verbosity())
    sys.stdin = io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main(["generate", *arguments])
    finally:
        sys.stdin = before[0]
        logging.set_verbosity(before[1])
        logging.enable_progress_bar()
    code = ended.value.code
    return (0 if code is None else int(code)), out.getvalue(), " ".join(err.getvalue().replace("│", " ").split())


def expected(folder: Path, prompt: str, tokens: int, **options: object) -> str:
    model, tokenizer = sq.hf.SubquadForCausalLM.from_pretrained(folder), sq.hf.ByteTokenizer()
    encoded = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**encoded, max_new_tokens=tokens, do_sample=False, **options)
    return tokenizer.decode(made[0, encoded["input_ids"].shape[1] :])


def test_greedy_text_of_a_byte_model(folder):
    code, out, err = run(str(folder), "--prompt", "né", "--tokens", "12")
    assert (code, err) == (0, "")
    assert out.rstrip("\n") == expected(folder, "né", 12).rstrip("\n")
    assert run(str(folder), "--prompt", "-", "--tokens", "12", stdin="né")[1] == out


def test_a_run_of_training_continues_text(tmp_path):
    run_folder = tmp_path / "run"
    tiny = {"layers": 1, "heads": 2, "dim": 16}
    once = {"steps": 1, "batch": 2, "valid_examples": 1}
    quick = Running(tensorboard=False)
    train(Run.of("text", "linear", model=tiny, settings=once, length=16), run_folder, running=quick)
    code, out, err = run(str(run_folder), "--prompt", "né", "--tokens", "12")
    assert (code, err) == (0, "")
    _, model, _ = load_trained(run_folder)
    sq.hf.SubquadForCausalLM.from_nn(model.backbone).save_pretrained(tmp_path / "saved")
    assert out.rstrip("\n") == expected(tmp_path / "saved", "né", 12).rstrip("\n")
    train(Run.of("copy", "linear", model=tiny, settings=once, length=4), tmp_path / "copy", running=quick)
    code, _, err = run(str(tmp_path / "copy"), "--prompt", "a")
    assert code == 2
    assert "is a run of the task 'copy'" in err


def test_beams_and_a_saved_tokenizer(folder):
    sq.hf.ByteTokenizer().save_pretrained(folder)
    code, out, _ = run(str(folder), "--prompt", "ab", "--tokens", "6", "--beams", "3")
    assert code == 0
    assert out.rstrip("\n") == expected(folder, "ab", 6, num_beams=3).rstrip("\n")


def test_sampling_follows_the_seed(folder):
    arguments = (str(folder), "--prompt", "ab", "--tokens", "30", "--temperature", "2", "--top-k", "50")
    one, again, other = (run(*arguments, "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert one == again
    assert one != other


def test_a_model_of_transformers_with_its_own_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["[UNK]", "one", "two", "three"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[UNK]")
    tokenizer.save_pretrained(tmp_path)
    config = GPT2Config(vocab_size=4, n_embd=8, n_layer=1, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=None)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    code, out, err = run(str(tmp_path), "--prompt", "one two", "--tokens", "5")
    assert code == 0, err
    assert set(out.split()) <= {"one", "two", "three", "[UNK]"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", ""), "--prompt is empty: give at least one character"),
        (("--prompt", "a", "--temperature", "0"), "--temperature 0: for greedy decoding leave out --temperature"),
        (("--prompt", "a", "--temperature", "-1"), "temperature must be a finite number of at least 0"),
        (("--prompt", "a", "--top-p", "2"), "top_p must be a number in (0, 1], got 2.0"),
        (("--prompt", "a", "--tokens", "0"), "--tokens"),
    ],
    ids=["empty", "zero", "negative", "top-p", "tokens"],
)
def test_bad_input_is_a_message_and_exit_code_2(folder, arguments, message):
    code, out, err = run(str(folder), *arguments)
    assert code == 2
    assert out == ""
    assert message in err


def test_bad_folders(tmp_path, folder):
    code, _, err = run(str(tmp_path / "nowhere"), "--prompt", "a")
    assert code == 2
    assert "nowhere does not exist; expected a folder written by save_pretrained or by `subquad train text`" in err
    assert "holds no config.json" in run(str(tmp_path), "--prompt", "a")[2]
    (folder / "model.safetensors").write_bytes(b"no")
    code, _, err = run(str(folder), "--prompt", "a")
    assert code == 2
    assert "model.safetensors" in err.replace(" ", "")
    (folder / "config.json").write_text("{")
    assert "is not JSON" in run(str(folder), "--prompt", "a")[2]


def test_too_long_for_learned_positions(tmp_path):
    config = sq.hf.SubquadConfig(
        layers=1, heads=2, dim=8, vocab=256, mechanism="linear", positions="learned", max_positions=10
    )
    sq.hf.SubquadForCausalLM(config).save_pretrained(tmp_path)
    code, out, err = run(str(tmp_path), "--prompt", "1234567", "--tokens", "9")
    assert (code, out) == (2, "")
    assert "the model learned 10 positions; use --tokens 3 or less" in err


def test_a_vocabulary_without_a_tokenizer(tmp_path):
    config = sq.hf.SubquadConfig(layers=1, heads=2, dim=8, vocab=300, mechanism="linear")
    sq.hf.SubquadForCausalLM(config).save_pretrained(tmp_path)
    code, _, err = run(str(tmp_path), "--prompt", "a")
    assert code == 2
    assert "has no tokenizer, and its vocabulary of 300" in err


def test_converted_models_with_learned_positions_and_without_a_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    config.bos_token_id = config.eos_token_id = 0
    model, _ = sq.hf.convert(GPT2LMHeadModel(config).eval(), "lsh", buckets=4, bucket_size=4, seed=0)
    model.save_pretrained(tmp_path)
    sq.hf.ByteTokenizer().save_pretrained(tmp_path)
    code, _, err = run(str(tmp_path), "--prompt", "hello", "--tokens", "100")
    assert code == 2 and "learned 64 positions" in err
    code, _, err = run(str(tmp_path), "--prompt", "hello", "--tokens", "4")
    assert code == 0, err
