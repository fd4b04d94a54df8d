"""`gsa probe slots`: what it says of slots is what the equations do with them."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gsa.errors import GSAError
from gsa.eval.probes.slot_use import SlotUse, slot_use
from gsa.eval.probes.slots_picture import save_picture
from gsa.infer.model import Model
from gsa.mixers.base import Mixer
from gsa.mixers.sequences import sequences_of
from gsa.ops import gated_linear_attention
from gsa.ops.registry import watch
from tests.cli.running import run
from tests.models.cases import config, ids, model

CASES = ("gsa", "gsa, convolved", "gsa, constant gate", "gsa, no gate", "abc", "abc, growing", "hybrid")


def loop(mixer: Mixer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Writes [T, H, M], reads [T, HQ, M] and gates [T, H, M] of a mixer that reads x [1, T, D]: token by token."""
    options, sequences = mixer.options, sequences_of(x, None, "test")
    q, k, *_ = mixer.project(x, None, sequences, False)
    logits = getattr(mixer, "f_proj", getattr(mixer, "s_proj", None))
    bounded = options.mixer == "abc" or options.gate == "none"
    if options.mixer == "abc":
        q, k, _ = options.turn(q, k, None, sequences)
    T, HQ, K = q.shape[1:]
    H, M = k.shape[2], options.num_slots
    gates = mixer.gate_logits.expand(T, H, M) if logits is None else logits(x)[0].reshape(T, H, M)
    scale = K**-0.5 if options.scale is None else options.scale
    memory, total = torch.zeros(H, M, K, dtype=torch.float64), torch.zeros(H, M, dtype=torch.float64)
    writes, reads, kept = [], [], []
    for t in range(T):
        if bounded:
            total = total + gates[t].double().exp()
            write = gates[t].double().exp() / total
            keep = 1 - write if getattr(options, "normalise", False) else torch.ones_like(write)
        else:
            keep = gates[t].double().sigmoid() ** (1 / options.gate_temperature)
            write = 1 - keep
        memory = keep[:, :, None] * memory + write[:, :, None] * k[0, t, :, None, :].double()
        scores = memory.repeat_interleave(HQ // H, 0) @ (scale * q[0, t, :, :, None].double())
        writes.append(write)
        reads.append(scores[..., 0].softmax(-1))
        kept.append(keep)
    return torch.stack(writes), torch.stack(reads), torch.stack(kept)


@pytest.mark.parametrize("case", CASES)
def test_slot_use_is_that_of_the_equations(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.eval.probes.slot_use.MAX_READ", 4)  # the last piece is a single token
    text = ids(1, 9)
    engine = Model.load(model(case), weights="fp32", compute="fp32")
    inputs: dict[int, Tensor] = {}
    for number, block in enumerate(engine.lm.model.layers):
        block.mixer.register_forward_pre_hook(lambda _, x, n=number: inputs.__setitem__(n, x[0]))
    found = slot_use(engine, text[0].tolist())
    inputs.clear()
    with torch.inference_mode():
        engine.lm.model(text)
        assert [use.layer for use in found] == ([0, 1] if case == "hybrid" else [0, 1, 2])
        for use in found:
            writes, reads, kept = loop(engine.lm.model.layers[use.layer].mixer, inputs[use.layer])
            assert use.reads.sum(-1).allclose(torch.ones(()))
            for ours, true in ((use.writes, writes), (use.reads, reads), (use.log_gates.exp(), kept)):
                assert (ours - true).abs().max() < 1e-5
    assert found[0].reads.shape[1] == (2 if case in CASES[1:4] else 4)


def test_slots_of_a_hybrid_are_used_when_tokens_leave_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.eval.probes.slot_use.MAX_READ", 4)
    engine, inputs = Model.load(model("hybrid mixer"), weights="fp32", compute="fp32"), []
    mixer = engine.lm.model.layers[0].mixer
    mixer.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    use, *_ = slot_use(engine, ids(1, 9)[0].tolist())
    first = mixer.options.window + mixer.options.num_sinks
    assert not use.writes[:first].any()
    assert not use.reads[:first].any()
    assert use.reads[first:].sum(-1).allclose(torch.ones(()))
    with torch.inference_mode():
        _, k, v = mixer.project(torch.cat(inputs, 1))
        left = slice(mixer.options.num_sinks, 9 - mixer.options.window)
        log_gates, taken = (x[0, left] for x in mixer.slot_router(k, v))
    assert (use.log_gates[first:] - log_gates).abs().max() < 1e-5
    assert (use.writes[first:] - taken).abs().max() < 1e-5
    assert (use.half_lives - torch.log(torch.tensor(2.0)) / -log_gates.mean(0)).abs().max() < 1e-2
    assert (use.effective()["read_by_token"] <= 4).all()


def use_of(writes: list, reads: list, gates: list) -> SlotUse:
    """One key/value head; a query head for each list of reads."""
    log_gates = torch.tensor(gates).log()[:, None]
    return SlotUse(0, "gsa", torch.tensor(writes)[:, None], torch.tensor(reads).transpose(0, 1), log_gates)


def test_half_lives_and_dead_slots() -> None:
    even, one = [0.25] * 4, [0.0, 1.0, 0.0, 0.0]
    use = use_of(
        writes=[[0.5, 0.0, 0.05, 0.2]] * 3,
        reads=[[even] * 3, [one] * 3],
        gates=[[0.1, 0.1, 0.1, 0.1], [0.5, 1.0, 0.25, 0.8], [0.5, 1.0, 1.0, 0.8]],
    )
    # The first token's gates have nothing to forget. Gates of 1/4 and 1 are 1/2 on average of their logarithms.
    assert use.half_lives[0].tolist() == pytest.approx([1.0, math.inf, 1.0, math.log(2) / -math.log(0.8)])
    assert use.never_written(0.1).tolist() == [[False, True, False, False]]  # 3 x 0.05 is more
    assert use.never_written(0.2).tolist() == [[False, True, True, False]]
    assert not use.never_read(0.99).any()  # the first query head reads all slots
    alone = use_of([[0.5] * 4] * 2, [[one] * 2], [[0.5] * 4] * 2)
    assert alone.never_read(0.1).tolist() == [[True, False, True, True]]
    assert alone.effective()["read"].tolist() == alone.effective()["read_by_token"].tolist() == [1.0]
    assert alone.effective()["written"].tolist() == pytest.approx([4.0])
    both = use.effective()
    assert both["read_by_token"].tolist() == pytest.approx([math.sqrt(4 * 1)])  # entropies have means, not their exp


def test_readouts_that_read_nothing() -> None:
    engine = Model.load(model("gsa", readout="relu"), weights="fp32", compute="fp32")
    for use in slot_use(engine, ids(1, 20)[0].tolist()):
        totals = use.reads.sum(-1)
        assert ((totals - 1).abs().lt(1e-5) | (totals == 0)).all()
        assert use.effective()["read_by_token"].isfinite().all()


@pytest.mark.parametrize("case", ["gla", "mamba", "retnet"])
def test_models_without_slots_are_refused(case: str) -> None:
    with pytest.raises(GSAError, match=f"no slots: the mixers of its layers are {case}; expected .* gsa, abc"):
        slot_use(Model.load(model(case)), [1, 2, 3])


def test_calls_are_watched_only_inside() -> None:
    calls: list = []
    q, k, v = torch.randn(3, 1, 5, 2, 8)
    with watch(calls.append):
        seen, _ = gated_linear_attention(q, k, v)
    unseen, _ = gated_linear_attention(q, k, v)
    assert torch.equal(seen, unseen)
    assert len(calls) == 1


def test_pictures_of_any_text(tmp_path: Path) -> None:
    layers = slot_use(Model.load(model("abc, growing")), ids(1, 5)[0].tolist())  # which never forgets
    save_picture(layers, layers[1], 3, ["$x_{", "\n", "\ud7ff", "\x00", "^"], tmp_path / "a.png", "a model")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = "It was a dark and stormy night, and the rain fell in torrents."
    (tmp_path / "text.txt").write_text(text)
    given = ("probe", "slots", "gsa-tiny", "--weights", "fp32", "--compute", "fp32")
    code, out, err = run(capsys, *given, "--text", tmp_path / "text.txt", "--rows", "3", "--save", tmp_path / "use")
    assert (code, err) == (0, "")
    assert "Slots of gsa-tiny over 20 tokens" in out
    assert "Layer 3, head 0: the first 3 tokens" in out
    assert "half-life in tokens" in out
    tensors = load_file(tmp_path / "use")
    assert tensors["layers.2.reads"].shape == (20, 4, 32)

    code, out, _ = run(capsys, *given, "--prompt", text, "--json", "--layer", "2", "--head", "1", "--max-tokens", "10")
    found = json.loads(out)
    assert code == 0
    assert [layer["layer"] for layer in found["layers"]] == [0, 1, 2, 3]
    followed = found["followed"]
    assert (followed["layer"], followed["head"], len(followed["tokens"])) == (2, 1, 10)
    assert "".join(token["text"] for token in followed["tokens"]) in text
    reads = torch.tensor([token["reads"] for token in followed["tokens"]])
    assert reads.allclose(tensors["layers.2.reads"][:10, 1], atol=1e-4)
    assert len(found["layers"][0]["heads"][3]["half_lives"]) == 32

    code, out, _ = run(capsys, *given, "--prompt", text, "--by-head", "--rows", "0", "--markdown")
    assert code == 0
    assert out.count("\n| ") == 2 + 4 * 4


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("gsa-tiny",), "expected a text"),
        (("gsa-tiny", "--prompt", "text", "--text", "text.txt"), "expected a text"),
        (("gsa-tiny", "--prompt", "text", "--layer", "4"), "layer 4 has no slots, expected one of 0, 1, 2, 3"),
        (("gsa-tiny", "--prompt", "text", "--head", "4"), "head must be 0 to 3 in layer 3, got 4"),
        (("gsa-tiny", "--prompt", "text", "--threshold", "-1"), "threshold must be at least 0, got -1"),
        (("gsa-tiny", "--prompt", "text", "--max-tokens", "1"), "max_tokens must be at least 2, got 1"),
        (("gsa-tiny", "--prompt", "a"), "at least 2 tokens, got 1"),
        (("gsa-tiny", "--prompt", "text", "--json", "--markdown"), "exclude each other"),
        (("gsa-tiny", "--prompt", "text", "--plot", "no/such/folder"), "'no/such/folder' cannot be written"),
    ],
)
def test_mistakes(args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    code, out, err = run(capsys, "probe", "slots", *args)
    assert (code, out) == (2, "")
    assert said in err


def test_hybrids_name_their_layers(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from gsa.data.tokenizer import BytesTokenizer
    from gsa.models import LM

    LM(config("hybrid", vocab_size=257)).save_pretrained(tmp_path)
    BytesTokenizer().save(tmp_path)
    code, out, _ = run(capsys, "probe", "slots", tmp_path, "--prompt", "some text", "--json")
    assert code == 0
    assert [layer["layer"] for layer in json.loads(out)["layers"]] == [0, 1]
    code, _, err = run(capsys, "probe", "slots", tmp_path, "--prompt", "some text", "--layer", "2")
    assert code == 2
    assert "layer 2 has no slots, expected one of 0, 1" in err
