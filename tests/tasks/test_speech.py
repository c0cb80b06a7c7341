"""Speech: frames, labels and error rates are right; files that cannot be used are named."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch import nn

from subquad.tasks.audio_files import DIGITS, log_mel, read_wav, spoken_tones
from subquad.tasks.base import DataError, generator_for
from subquad.tasks.speech import Speech, _BiLSTM, word_errors

SHAPE = {"layers": 2, "heads": 2, "dim": 32, "seed": 0}


def write_wav(path: Path, rate: int = 8000, seconds: float = 0.2, level: float = 0.3) -> None:
    time = np.arange(int(rate * seconds)) / rate
    soundfile.write(path, level * np.sin(2 * np.pi * 440 * time), rate)


def test_a_tone_is_loudest_in_its_own_band() -> None:
    time = torch.arange(8000) / 8000
    low, high = (
        log_mel(torch.sin(2 * torch.pi * hertz * time), 8000, 40).mean(0).argmax() for hertz in (300.0, 2500.0)
    )
    assert int(low) < 15 < 25 < int(high)


def test_utterances_are_strings_of_digits_with_their_labels() -> None:
    task = Speech(digits=6, fewest=2)
    items = [task.examples("train").item(0, generator_for("train", 0, draw)) for draw in range(40)]
    counts = {len(item["symbols"]) for item in items}
    assert counts == {2, 3, 4, 5, 6}
    assert {int(s) for item in items for s in item["symbols"]} == set(range(1, 11))
    by_count = sorted((len(item["symbols"]), len(item["frames"])) for item in items)
    assert by_count[0][1] < by_count[-1][1]


def test_recordings_of_digits_are_strung_together_and_split_apart(tmp_path: Path) -> None:
    for digit in range(10):
        for take in range(3):
            write_wav(tmp_path / f"{digit}_ann_{take}.wav")
    task = Speech(data=str(tmp_path), digits=4, fewest=4)
    assert task.units() == DIGITS
    train, valid = (task.examples(split).recordings for split in ("train", "valid"))  # type: ignore[attr-defined]
    assert (len(train), len(valid)) == (27, 3)
    assert not set(train) & set(valid)
    assert len(task.examples("valid").item(0, generator_for("valid", 0, 0))["symbols"]) == 4


def test_sentences_with_transcripts_are_letters(tmp_path: Path) -> None:
    for index in range(10):
        write_wav(tmp_path / f"{index}.wav", seconds=1.0)
    (tmp_path / "transcripts.txt").write_bytes(b"\xef\xbb\xbf" + b"".join(b"%d.wav\tAb  ba\n" % i for i in range(10)))
    task = Speech(data=str(tmp_path))
    assert task.units() == (" ", "a", "b")
    assert task.examples("train").item(0, torch.Generator())["symbols"].tolist() == [2, 3, 1, 3, 2]
    assert len(task.examples("train")) == 9


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rate", {"rate": 16000}, "has 16000 samples per second, expected rate=8000.*--set rate=16000"),
        ("silence", {"level": 0.0}, "silence only"),
    ],
)
def test_recordings_that_cannot_be_used_are_named(
    name: str, options: dict[str, float], message: str, tmp_path: Path
) -> None:
    for index in range(20):
        write_wav(tmp_path / f"{index % 10}_{index}.wav")
    write_wav(tmp_path / f"7_{name}.wav", **options)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=rf"7_{name}.wav.*{message}"):
        [Speech(data=str(tmp_path)).examples(split) for split in ("train", "valid")]


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        Speech(data=str(tmp_path / "no")).examples("train")
    with pytest.raises(DataError, match="0 wav files"):
        Speech(data=str(tmp_path)).examples("train")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/song.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match=r"'song.wav' is neither"):
        Speech(data=str(tmp_path / "b")).examples("train")
    (tmp_path / "b/song.wav").rename(tmp_path / "b/1_song.wav")
    (tmp_path / "c").mkdir()
    (tmp_path / "b/1_song.wav").rename(tmp_path / "c/1_song.wav")
    with pytest.raises(DataError, match="cannot be read as audio"):
        Speech(data=str(tmp_path / "c")).examples("train")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/transcripts.txt").write_text("a.wav\n")
    with pytest.raises(DataError, match=r"line 1: 'a\.wav'; expected a file name"):
        Speech(data=str(tmp_path / "d")).examples("train")
    with pytest.raises(ValueError, match="fewest=9 must not be above digits=3"):
        Speech(digits=3, fewest=9)


def test_repeats_and_blanks_are_removed_and_errors_counted() -> None:
    model = Speech().build({**SHAPE, "mechanism": "linear"})
    path = torch.tensor([[0, 1, 1, 0, 1, 2, 2, 9]])
    logs = torch.nn.functional.one_hot(path, 11).float()
    assert model.transcribe(logs, torch.tensor([7])) == ["zero zero one"]
    assert word_errors(["zero zero one", "two"], ["zero one", "two two"]) == (2, 4)


def test_a_model_begins_with_mostly_blank_frames() -> None:
    """From equal chances, a model of utterances of 400 to 2400 frames ends up repeating one digit in place of it."""
    model = Speech().build({**SHAPE, "mechanism": "linear"}).eval()
    with torch.no_grad():
        logs, _ = model.log_probabilities(torch.randn(2, 60, 40), torch.tensor([60, 60]))
    assert float(logs[..., 0].exp().mean()) > 0.7


def test_the_baseline_has_as_many_parameters_and_ignores_padding() -> None:
    task = Speech()
    sizes = {}
    for mechanism in ("softmax", "bilstm"):
        model = task.build({**task.model, "mechanism": mechanism, "seed": 0}).eval()
        sizes[mechanism] = sum(p.numel() for p in model.parameters())
        frames = torch.randn(2, 60, 40)
        frames[1, 33:] = 0
        with torch.no_grad():
            both, kept = model.log_probabilities(frames, torch.tensor([60, 33]))
            alone, _ = model.log_probabilities(frames[1:, :33], torch.tensor([33]))
        torch.testing.assert_close(both[1, : kept[1]], alone[0], rtol=1e-4, atol=1e-4)
    assert sizes["bilstm"] == pytest.approx(sizes["softmax"], rel=0.02)


def test_the_baseline_is_torchs_bidirectional_lstm() -> None:
    """Padded and turned within each length, it equals what torch computes of packed sequences."""
    torch.manual_seed(0)
    ours = _BiLSTM(layers=2, dim=8, parameters=2000).double()
    theirs = nn.LSTM(8, ours.ahead[0].hidden_size, 2, batch_first=True, bidirectional=True).double()
    weights = {}
    for layer in range(2):
        for lstm, suffix in ((ours.ahead[layer], ""), (ours.back[layer], "_reverse")):
            weights |= {name.replace("l0", f"l{layer}{suffix}"): x for name, x in lstm.state_dict().items()}
    theirs.load_state_dict(weights)
    x, lengths = torch.randn(3, 12, 8, dtype=torch.float64), torch.tensor([12, 5, 1])
    mask = torch.arange(12) < lengths.unsqueeze(-1)
    packed = nn.utils.rnn.pack_padded_sequence(ours.norm(x), lengths, batch_first=True)
    expected = ours.out(nn.utils.rnn.pad_packed_sequence(theirs(packed)[0], batch_first=True)[0])
    torch.testing.assert_close(ours(x, key_mask=mask)[mask], expected[mask])


def test_tones_of_different_digits_differ() -> None:
    waves = [spoken_tones(d, 8000, torch.Generator().manual_seed(0)) for d in range(10)]
    frames = [log_mel(wave, 8000, 40)[2:8].mean(0) for wave in waves] + [
        log_mel(w, 8000, 40)[-8:-2].mean(0) for w in waves
    ]
    pairs = {(int(a.argmax()), int(b.argmax())) for a, b in zip(frames[:10], frames[10:], strict=True)}
    assert len(pairs) == 10


def test_what_cannot_be_spelled_is_named(tmp_path: Path) -> None:
    for index in range(10):
        write_wav(tmp_path / f"{index}.wav", seconds=0.1)
    (tmp_path / "transcripts.txt").write_text("".join(f"{i}.wav llllllll\n" for i in range(10)))
    task = Speech(data=str(tmp_path), stride=1)
    with pytest.raises(DataError, match=r"\d\.wav: 8 symbols need 15 frames, and it has \d+.*leave it out"):
        task.examples("train").item(0, generator_for("train", 0, 0))


def test_samples_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "1_a_0.wav", np.array([0.1, np.nan, 0.2] * 100, dtype=np.float32), 8000, subtype="FLOAT")
    with pytest.raises(DataError, match=r"1_a_0\.wav has samples that are no numbers"):
        read_wav(tmp_path / "1_a_0.wav", 8000)
