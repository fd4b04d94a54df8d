"""The hybrid: its teacher exactly while nothing has left the window, and calibrated beyond."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gsa.convert import Choices, convert
from gsa.convert.distances import measured, quantiles
from gsa.convert.slots import LARGEST_BIAS, centres
from gsa.errors import GSAError
from gsa.mixers.attention import Attention
from gsa.models.checkpoint import load_model
from tests.convert.families import CASES, VOCABULARY, made, model_of, saved

W, S = 6, 2
TEXT = "It was the best of times, it was the worst of times. " * 20
FULL = [
    case if case in ("llama", "qwen2", "qwen3") else pytest.param(case, marks=pytest.mark.slow)
    for case in CASES
    if "window" not in case
]


def hybrid(**more: object) -> Choices:
    return Choices(**{"to": "hybrid", "window": W, "sinks": S, "slots": 5, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("case", FULL)
def test_it_is_its_teacher_while_nothing_has_left_the_window(tmp_path: Path, case: str) -> None:
    """For T <= W + S tokens, in every family; and not for more."""
    ids = torch.randint(VOCABULARY, (2, W + S + 1), generator=torch.Generator().manual_seed(1))
    source = saved(tmp_path / "source", case)
    for positions in ("window", "own"):
        made(source, tmp_path / positions, hybrid(slot_positions=positions))
        with torch.no_grad():
            found, expected = load_model(tmp_path / positions)(ids).logits, model_of(case)(ids).logits
        off = (found - expected).abs().amax((0, 2)) / expected.abs().max()
        assert off[: W + S].max() < 1e-5
        assert off[W + S] > 1e-4


def test_half_lives_are_quantiles_of_attention() -> None:
    """Attention that falls off evenly over 100 tokens has its quantiles evenly there."""
    ages = torch.ones(2, 100)
    assert torch.allclose(quantiles(ages, 10)[0], torch.arange(5.0, 100, 10))
    ages[1, 50:] = 0
    assert quantiles(ages, 10)[1].max() <= 50


def test_clusters_are_found() -> None:
    random = torch.Generator().manual_seed(0)
    true = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    x = (true[:, None] + 0.1 * torch.randn(3, 50, 2, generator=random)).flatten(0, 1)
    found = min(
        (centres(x, 3, torch.Generator().manual_seed(seed)) for seed in range(4)),
        key=lambda c: torch.cdist(true, c).amin(1).max(),
    )
    assert torch.cdist(true, found).amin(1).max() < 0.1
    assert centres(x[:2], 5, random).shape == (5, 2)


@pytest.mark.parametrize(("router", "positions"), [("softmax", "own"), ("softmax", "window"), ("gates", "own")])
def test_calibrated_slots_are_closest_to_the_teacher(tmp_path: Path, router: str, positions: str) -> None:
    """Measured from outside: with any other bias of a head, its outputs in the first layer are further off."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    source = saved(tmp_path / "source")
    convert(source, tmp_path / "out", hybrid(slot_router=router, slot_positions=positions), text=str(text), tokens=512)
    made(source, tmp_path / "teacher", Choices(to="attention"))
    record = json.loads((tmp_path / "out/convert.json").read_text())["calibration"]
    assert (record["text"], record["tokens"], len(record["layers"])) == ("text.txt", 512, 3)
    ids = torch.tensor([list(TEXT.encode())[:512]])
    layers = [load_model(tmp_path / name).model for name in ("teacher", "out")]
    with torch.no_grad():
        x = layers[0].layers[0].mixer_norm(layers[0].embeddings(ids))
        expected, mixer = head_outputs(layers[0].layers[0].mixer, x), layers[1].layers[0].mixer
        chosen = mixer.slot_bias.clone()
        errors = []
        for change in (0.0, -1.0, -0.25, 0.25, 1.0):
            mixer.slot_bias.copy_(chosen + change)
            errors.append((head_outputs(mixer, x) - expected).square().sum((0, 2)))
    best, *others = errors
    inside = chosen.abs() < LARGEST_BIAS
    assert inside.any()
    for other in others:
        assert (best[inside] < other[inside]).all()


def head_outputs(mixer: Attention, x: torch.Tensor) -> torch.Tensor:
    """[T, HQ, K] behind everything that lies in the window of all."""
    last, mixer.o_proj = mixer.o_proj, torch.nn.Identity()  # type: ignore[assignment]
    y = mixer(x)[0][0, W + S :].unflatten(-1, (-1, mixer.options.key_width))
    mixer.o_proj = last
    return y


def test_the_teachers_attention_is_measured_beyond_window_and_sinks(tmp_path: Path) -> None:
    """Against transformers' own attention weights."""
    teacher = model_of("llama")
    teacher.set_attn_implementation("eager")
    made(saved(tmp_path / "source"), tmp_path / "out", Choices(to="attention"))
    model = load_model(tmp_path / "out").model
    ids = torch.tensor([list(TEXT.encode())[:100]])
    with torch.no_grad():
        p = teacher(ids, output_attentions=True).attentions[0][0]  # [HQ, T, T]
        found = measured(model.layers[0].mixer, model.layers[0].mixer_norm(model.embeddings(ids)), W, S)
    far = [[[p[h, t, j] if S <= j <= t - W else 0.0 for j in range(100)] for t in range(100)] for h in range(4)]
    far = torch.tensor(far)
    assert torch.allclose(found.beyond, far.sum(-1)[:, W + S :].mean(-1), atol=1e-5)
    for age in (0, 1, 50):
        expected = torch.stack([far[h].diagonal(-age - W).sum() for h in range(4)])
        assert torch.allclose(found.ages[:, age], expected.view(2, 2).sum(1), atol=1e-4)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "mistral, window")
    with pytest.raises(GSAError, match="window and sinks are 8 tokens, the teacher sees no more than 6"):
        convert(source, tmp_path / "out", hybrid())
    source = saved(tmp_path / "other")
    for choices, tokens, message in (
        (hybrid(window=600), 512, "nothing lies beyond window and sinks of 602 tokens"),
        (hybrid(feature_map="relu"), 0, "feature_map does nothing for hybrid"),
        (hybrid(paper=True), 0, "paper does nothing for hybrid"),
        (Choices(to="gsa", window=5), 0, "window does nothing for gsa"),
    ):
        with pytest.raises(GSAError, match=message):
            convert(source, tmp_path / "out", choices, tokens=tokens)
    (tmp_path / "short.txt").write_text("It was.")
    with pytest.raises(GSAError, match="nothing in retnet is calibrated"):
        convert(source, tmp_path / "out", Choices(to="retnet", feature_map="softmax"), text=str(tmp_path / "short.txt"))
    with pytest.raises(GSAError, match=r"nowhere\.txt cannot be read"):  # before the source is looked for
        convert(tmp_path / "no source", tmp_path / "out", hybrid(), text=str(tmp_path / "nowhere.txt"))
    with pytest.raises(GSAError, match="has 7 tokens, calibration needs at least 512"):
        convert(source, tmp_path / "out", hybrid(), text=str(tmp_path / "short.txt"), tokens=512)
    (source / "tokenizer.json").unlink()
    with pytest.raises(GSAError, match="which calibration needs"):
        convert(source, tmp_path / "out", hybrid())
    assert not (tmp_path / "out").exists()
