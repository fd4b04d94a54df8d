"""At evaluations a run shows what the model writes, and trains as if it did not; its smoothed loss goes on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gsa.data.tokenizer import load_tokenizer
from gsa.models import LM, ModelConfig
from gsa.models.checkpoint import load_model
from gsa.terminal import shown
from gsa.train.loop import Trainer
from gsa.train.run import train
from gsa.train.sample import sample
from tests.train.runs import MODEL, final_weights, losses, prepared, run_settings, same_bits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    prepared(folder)
    return folder


def metrics(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_sample_is_shown_at_evaluations_and_changes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    threads = torch.get_num_threads()
    train(run_settings(folder, str(tmp_path / "with"), json=False, sample_prompt="Alice ", sample_tokens=8))
    told = capsys.readouterr().err
    train(run_settings(folder, str(tmp_path / "without"), json=False, sample_tokens=0))
    assert "Alice" not in capsys.readouterr().err
    torch.set_num_threads(threads)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert same_bits(final_weights(tmp_path / "with"), final_weights(tmp_path / "without"))
    samples = {line["step"]: line["sample"] for line in metrics(tmp_path / "with") if "sample" in line}
    assert list(samples) == [4, 8, 12]
    for step, text in samples.items():
        assert f"step {step}: Alice {shown(text)}" in told
    assert not any("sample" in line for line in metrics(tmp_path / "without"))
    newest = load_model(tmp_path / "with" / "checkpoints" / "step-00000012")
    assert sample(newest, load_tokenizer("bytes"), "Alice ", 8) == samples[12]


def test_the_likeliest_tokens_up_to_the_end_of_the_text() -> None:
    tokenizer = load_tokenizer("bytes")
    model = LM(ModelConfig(mixer="gsa", vocab_size=320, **MODEL)).eval()
    ids = list(b"The")
    with torch.no_grad():
        for _ in range(5):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1, : tokenizer.vocab_size].argmax()))
    expected = ids[3:]
    assert sample(model, tokenizer, "The", 5) == tokenizer.decode(expected)
    assert isinstance(sample(model, tokenizer, "", 3), str)
    ends = SimpleNamespace(
        encode=tokenizer.encode, decode=tokenizer.decode, vocab_size=tokenizer.vocab_size, eos_id=expected[-1]
    )
    assert sample(model, ends, "The", 5) == tokenizer.decode(expected[: expected.index(expected[-1])])


def test_the_smoothed_loss_goes_on_after_an_interruption(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def smoothed(run: str) -> float:
        state = tmp_path / run / "checkpoints" / "step-00000012" / "state.json"
        return json.loads(state.read_text())["smoothed_loss"]

    train(run_settings(folder, str(tmp_path / "whole")))
    settings, step = run_settings(folder, str(tmp_path / "run")), Trainer._step

    def broken(self: Trainer, *args: object) -> object:
        if self.position.step == 7:
            raise RuntimeError("power cut")
        return step(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", broken)
        with pytest.raises(RuntimeError, match="power cut"):
            train(settings)
    assert train(settings).begin == 6
    assert smoothed("run") == smoothed("whole")
    values = losses(tmp_path / "whole")
    expected = values[0]
    for value in values[1:]:
        expected = 0.9 * expected + 0.1 * value
    assert smoothed("whole") == pytest.approx(expected)
