"""What peft, trl, accelerate, torchao and collators hand to the models is taken as they mean it, or refused by name."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, Trainer

from gsa import LM, GSAForCausalLM
from gsa.models import loss as losses
from tests.models.hf_models import (
    PAD,
    VOCABULARY,
    assert_same,
    every_mixer,
    left_padded,
    tiny_config,
    tiny_model,
    tokens,
    uncached_logits,
)
from tests.models.test_hf_model import trainer, training_rows


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """By its definition."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# --- heads that are more than a matrix


def with_bias(model: Any) -> None:
    head = nn.Linear(32, VOCABULARY)
    head.weight = model.lm_head.weight
    nn.init.normal_(head.bias)
    model.lm_head = head


def with_hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * 2)


def with_parametrization(model: Any) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Doubled())


def with_forward_of_its_own(model: Any) -> None:
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: plain(x) * 2


HEADS = [with_bias, with_hook, with_parametrization, with_forward_of_its_own]


@pytest.mark.parametrize("change", HEADS)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_the_loss_is_that_of_the_logits_whatever_the_head_is(
    change: Any, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_pieces:
        monkeypatch.setattr(losses, "LOGITS_AT_ONCE_OF_A_MODULE", 4 * VOCABULARY)
    ids = tokens(2, 9)
    theirs = tiny_model("gsa")
    ours = LM(theirs.config.to_model_config())
    for model in (theirs, ours):
        plain = model(ids, labels=ids).loss
        change(model)
        expected = loss_of(model(ids).logits, ids)
        assert abs(expected - plain) > 0.01
        for training in (False, True):
            assert_same(model.train(training)(ids, labels=ids).loss, expected)
        # Every parameter of the head learns what the logits teach it.
        heads = list(model.lm_head.parameters())
        gradients = torch.autograd.grad(model(ids, labels=ids).loss, heads)
        for gradient, wanted in zip(gradients, torch.autograd.grad(expected, heads), strict=True):
            assert_same(gradient, wanted)


def test_the_logits_of_a_called_head_are_held_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE_OF_A_MODULE", 4 * VOCABULARY)
    model, ids, lengths = tiny_model("gsa").train(), tokens(2, 9), []
    model.lm_head.register_forward_hook(lambda module, inputs, logits: lengths.append(logits.numel() // VOCABULARY))
    model(ids, labels=ids).loss.backward()
    assert max(lengths) == 4
    assert sum(lengths) == 2 * 18  # again in the pass backward


def test_adapters_on_the_head_are_in_the_loss_and_learn() -> None:
    model = get_peft_model(tiny_model("gsa"), LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    ids = tokens(2, 9)
    model.train()
    loss = model(input_ids=ids, labels=ids).loss
    assert_same(loss, loss_of(model(input_ids=ids).logits, ids))
    loss.backward()
    learnt = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.requires_grad}
    assert any("lm_head" in name for name in learnt)
    assert all(norm > 0 for norm in learnt.values()), learnt
    output = model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    assert output.shape == (2, 12)


def test_a_head_that_lies_on_disk_has_a_loss(tmp_path: Path) -> None:
    model, ids = tiny_model("gsa"), tokens(2, 9)
    model.save_pretrained(tmp_path / "model")
    places = {"model": "cpu", "lm_head": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert loaded.lm_head.weight.device.type == "meta"
    with torch.no_grad():
        for training in (False, True):
            assert_same(loaded.train(training)(ids, labels=ids).loss, model(ids, labels=ids).loss)


# --- logits in training


def test_logits_come_in_training_when_asked_for() -> None:
    model, ids = tiny_model("gsa").train(), tokens(2, 9)
    output = model(ids, labels=ids)
    with pytest.raises(AttributeError, match="output_logits=True in the call, or logits_in_training=True in the conf"):
        _ = output.logits
    assert getattr(output, "logits", None) is None
    with pytest.raises(AttributeError, match="no attribute 'attention'"):
        _ = output.attention
    output = model(ids, labels=ids, output_logits=True)
    assert_same(output.logits, uncached_logits(model, ids))
    assert_same(output.loss, loss_of(output.logits, ids))
    (output.logits.sum() * 0 + output.loss).backward()
    assert tiny_model("gsa", logits_in_training=True).train()(ids, labels=ids).logits.shape == (2, 9, VOCABULARY)


def test_a_loss_function_of_the_trainer_gets_logits(tmp_path: Path) -> None:
    seen = []

    def loss_function(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        seen.append(outputs.logits.shape)
        return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    plain = trainer(tmp_path, tiny_model("gsa", initializer_range=0.1), training_rows(4), max_steps=1)
    run = Trainer(
        model=plain.model, args=plain.args, train_dataset=plain.train_dataset, compute_loss_func=loss_function
    )
    run.train()
    assert seen == [(2, 12, VOCABULARY)] * 2


# --- packed sequences

LENGTHS = (5, 1, 6)


def packed() -> tuple[Tensor, Tensor]:
    """Three sequences in one row, and their positions."""
    return tokens(1, sum(LENGTHS)), torch.cat([torch.arange(length) for length in LENGTHS])[None]


def apart(model: GSAForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of the sequences, each by itself, end to end; and the loss of all."""
    parts = [uncached_logits(model, part) for part in ids.split(LENGTHS, 1)]
    total = sum(
        F.cross_entropy(logits[0, :-1], part[0, 1:], reduction="sum")
        for logits, part in zip(parts, ids.split(LENGTHS, 1), strict=True)
    )
    return torch.cat(parts, 1), total / (sum(LENGTHS) - len(LENGTHS))


@every_mixer
@pytest.mark.parametrize("training", [False, True])
def test_positions_that_start_again_are_packed_sequences(name: str, training: bool) -> None:
    model = tiny_model(name)
    ids, positions = packed()
    logits, loss = apart(model, ids)
    model.train(training)
    output = model(ids, position_ids=positions, labels=ids, output_logits=True)
    assert_same(output.logits, logits)
    assert_same(output.loss, loss)
    assert output.past_key_values is None


def test_sequences_may_be_told_in_every_way_that_collators_use() -> None:
    model = tiny_model("hybrid")
    ids, positions = packed()
    logits, loss = apart(model, ids)
    for options in (
        {},
        {"return_flash_attn_kwargs": True},
        {"return_seq_idx": True},
        {"return_position_ids": False, "return_flash_attn_kwargs": True},
        {"return_position_ids": False, "return_seq_idx": True},
    ):
        rows = [{"input_ids": part[0].tolist()} for part in ids.split(LENGTHS, 1)]
        batch = DataCollatorWithFlattening(**options)(rows, return_tensors="pt")
        output = model(**batch)
        assert_same(output.logits, logits)
        assert_same(output.loss, loss)
    # Rows of several sequences each, with pads; and a mask that hides nothing.
    assert_same(model(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits, logits)
    rows = torch.cat([F.pad(ids, (2, 1), value=PAD), F.pad(ids, (0, 3), value=PAD)])
    mask = torch.cat([F.pad(torch.ones_like(ids), (2, 1)), F.pad(torch.ones_like(ids), (0, 3))])
    places = torch.cat([F.pad(positions, (2, 1)), F.pad(positions, (0, 3))])
    output = model(rows, position_ids=places, attention_mask=mask, labels=rows, output_hidden_states=True)
    for row, real in zip(output.logits, mask.bool(), strict=True):
        assert_same(row[real][None], logits)
    assert_same(output.loss, loss)
    assert not output.hidden_states[-1][~mask.bool()].any()


@pytest.mark.slow
def test_compiled_code_packs_by_positions_too() -> None:
    model = tiny_model("gsa", num_hidden_layers=1)
    ids, positions = packed()
    logits, loss = apart(model, ids)
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, position_ids=positions, labels=ids)
    assert_same(output.logits, logits)
    assert_same(output.loss, loss)


@pytest.mark.parametrize("told_by", ["position_ids", "seq_idx"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pads_inside_a_packed_sequence_do_not_cut_it(told_by: str, compiled: bool) -> None:
    model, ids = tiny_model("gsa", num_hidden_layers=1), tokens(2, 8)
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1], [1, 0, 1, 1, 1, 0, 0, 1]])
    where = {
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 9, 1, 0, 1, 0, 0, 2]]),
        "seq_idx": torch.tensor([[0, 0, 0, 7, 0, 0, 0, 0], [0, 4, 0, 1, 1, 0, 0, 1]]),
    }
    sequences = [(0, [0, 1, 2, 4, 5, 6, 7]), (1, [0, 2]), (1, [3, 4, 7])]
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    output = call(ids, attention_mask=mask, labels=ids, **{told_by: where[told_by]})
    total = torch.tensor(0.0)
    for row, places in sequences:
        alone = uncached_logits(model, ids[row, places][None])[0]
        assert_same(output.logits[row, places], alone)
        total += F.cross_entropy(alone[:-1], ids[row, places[1:]], reduction="sum")
    assert_same(output.loss, total / 9)


def test_a_sequence_that_begins_at_a_pad_alone_is_none() -> None:
    model, ids = tiny_model("gsa"), tokens(1, 5)
    mask, numbers = torch.tensor([[1, 1, 1, 0, 0]]), torch.tensor([[0, 0, 0, 1, 1]])
    assert model(ids, attention_mask=mask, seq_idx=numbers, use_cache=True).past_key_values is not None


def test_positions_that_count_on_change_nothing() -> None:
    model = tiny_model("hybrid")
    ids, mask = left_padded([9, 5])
    expected = model(ids, attention_mask=mask)
    for positions in ((mask.cumsum(1) - 1).clamp(min=0), torch.arange(9)[None]):
        output = model(ids, attention_mask=mask, position_ids=positions)
        assert torch.equal(output.logits, expected.logits)
        rest = tokens(2, 3)
        more = model(rest, past_key_values=output.past_key_values, position_ids=positions[:, -1:] + torch.arange(1, 4))
        assert more.past_key_values.get_seq_length() == 12


@pytest.mark.parametrize(
    ("positions", "options", "message"),
    [
        ([[0, 1, 2, 4, 5]], {}, r"token 3 of row 0 is at position 4, expected 0, .* nor skip positions"),
        ([[5, 6, 7, 8, 9]], {}, r"token 0 of row 0 is at position 5.*context and sequence parallel"),
        ([[5, 6, 7, 8, 9]], {"use_cache": True}, r"token 0 of row 0 is at position 5.*context and sequence parallel"),
        ([[0, 1, 2, 1, 2]], {}, "token 3 of row 0 is at position 1"),
        ([[0, 1, 0, 1, 2]], {"use_cache": True}, "packed sequences .* have no cache"),
        ([[0.0, 1, 2, 3, 4]], {}, r"position_ids must be whole numbers \[B, T\] = \[1, 5\], got torch.float32"),
        ([[0, 1]], {}, r"position_ids must be whole numbers \[B, T\] = \[1, 5\], got torch.int64 \[1, 2\]"),
    ],
)
def test_positions_that_cannot_be_honoured_are_refused(positions: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model("gsa")(tokens(1, 5), position_ids=torch.tensor(positions), **options)


@pytest.mark.parametrize(("length", "start"), [(3, 0), (3, 6), (1, 0), (1, 6)])
def test_positions_that_do_not_go_on_from_a_cache_are_refused(length: int, start: int) -> None:
    model, ids = tiny_model("gsa"), tokens(1, 5 + length)
    cache = model(ids[:, :5], use_cache=True).past_key_values
    message = rf"token 0 of row 0 is at position {start}.* its cache has seen 5 tokens"
    with pytest.raises(ValueError, match=message):
        model(ids[:, 5:], past_key_values=cache, position_ids=torch.arange(start, start + length)[None])
    more = model(ids[:, 5:], past_key_values=cache, labels=ids[:, 5:], position_ids=torch.arange(5, 5 + length)[None])
    assert_same(more.logits, uncached_logits(model, ids)[:, 5:])


def test_a_row_may_begin_behind_a_cache_of_pads() -> None:
    """As where `generate` reads the prompts of a padded batch in chunks."""
    model = tiny_model("gsa")
    ids, mask = left_padded([9, 3])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    first = model(ids[:, :5], attention_mask=mask[:, :5], position_ids=positions[:, :5], use_cache=True)
    rest = model(ids[:, 5:], attention_mask=mask, position_ids=positions[:, 5:], past_key_values=first.past_key_values)
    assert_same(rest.logits[:, 1:], uncached_logits(model, ids, mask)[:, 6:])


def test_borders_that_contradict_each_other_and_unknown_arguments_are_refused() -> None:
    model, ids = tiny_model("gsa"), tokens(1, 5)
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 2, 5]), cu_seq_lens_k=torch.tensor([0, 3, 5]))
    with pytest.raises(TypeError, match="unexpected keyword argument 'shift_label'"):
        model(ids, shift_label=ids)


def test_the_loss_is_that_of_all_tokens_whichever_logits_are_kept() -> None:
    model, ids = tiny_model("gsa"), tokens(2, 6)
    expected = model(ids, labels=ids).loss
    for kept in (3, torch.tensor([1, 4]), torch.tensor([5, 4, 3, 2, 1, 0])):
        assert_same(model(ids, labels=ids, logits_to_keep=kept).loss, expected)


def test_labels_may_come_shifted() -> None:
    model = tiny_model("gsa")
    ids, mask = left_padded([9, 5])
    shifted = F.pad(torch.where(mask.bool(), ids, -100)[:, 1:], (0, 1), value=-100)
    expected = model(ids, attention_mask=mask, labels=ids).loss
    # transformers gives both under sequence parallelism
    anything = torch.where(mask.bool(), shifted, 3)
    for more in ({}, {"labels": shifted}):
        assert_same(model(ids, attention_mask=mask, shift_labels=anything, **more).loss, expected)
    with pytest.raises(ValueError, match=r"shift_labels must be int64 in the shape of ids"):
        model(ids, shift_labels=ids[:, 1:])


def test_the_trainer_trains_on_flattened_batches_as_on_padded_ones(tmp_path: Path) -> None:
    rows = [{"input_ids": tokens(1, length)[0].tolist()} for length in (4, 9, 6, 3)]
    weights = []
    for kind in ("padded", "flattened"):
        model = tiny_model("gsa", initializer_range=0.1)
        run = trainer(
            tmp_path / kind,
            model,
            [{**row, "labels": row["input_ids"]} for row in rows],
            optim="sgd",
            max_steps=1,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=1,
        )
        run.data_collator = DataCollatorWithFlattening() if kind == "flattened" else pad_left
        run.train()
        weights.append(model.state_dict())
    for key, weight in weights[0].items():
        torch.testing.assert_close(weights[1][key], weight, atol=1e-6, rtol=1e-5)


def pad_left(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([[PAD] * (width - len(row["input_ids"])) + list(row["input_ids"]) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": torch.where(ids == PAD, -100, ids)}


# --- generate


def test_generation_stops_at_strings() -> None:
    model, tokenizer = (auto.from_pretrained("gsa-tiny") for auto in (AutoModelForCausalLM, AutoTokenizer))
    text = tokenizer("It is a truth", return_tensors="pt")
    free = tokenizer.decode(model.generate(**text, max_new_tokens=20, do_sample=False)[0])
    stop = free[len("It is a truth") :].split()[3]
    output = model.generate(**text, max_new_tokens=20, do_sample=False, stop_strings=[stop], tokenizer=tokenizer)
    assert tokenizer.decode(output[0]) == free[: free.index(stop, 13) + len(stop)]


# --- gradients of hidden states


@pytest.mark.parametrize("name", ["gsa", "hybrid"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_hidden_states_of_a_padded_batch_have_the_gradients_of_each_row_alone(name: str, side: str) -> None:
    model, ids_mask = tiny_model(name), left_padded([9, 5])
    ids, mask = ids_mask if side == "left" else (x.flip(1) for x in ids_mask)

    def gradients(ids: Tensor, mask: Tensor | None) -> list[Tensor]:
        output = model(ids, attention_mask=mask, output_hidden_states=True)
        for hidden in output.hidden_states:
            hidden.retain_grad()
        (output.logits if mask is None else output.logits[mask.bool()]).square().sum().backward()
        assert all(hidden.grad is not None for hidden in output.hidden_states)
        return [hidden.grad for hidden in output.hidden_states]

    batch = gradients(ids, mask)
    for row, real in enumerate(mask.bool()):
        for whole, alone in zip(batch, gradients(ids[row, real][None], None), strict=True):
            assert float(alone.norm()) > 0
            torch.testing.assert_close(whole[row, real], alone[0], atol=1e-3, rtol=1e-3)
            assert not whole[row, ~real].any()


# --- quantised weights


@every_mixer
@pytest.mark.filterwarnings("ignore")  # torch announces the end of this way to quantise
def test_quantised_layers_have_states(name: str) -> None:
    """Their weight is a method, not a tensor; torchao's is a tensor without new_zeros."""
    model = torch.ao.quantization.quantize_dynamic(tiny_model(name), {nn.Linear}, dtype=torch.qint8)
    ids, mask = left_padded([9, 5])
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, labels=ids)
        cache = model(ids[:, :6], attention_mask=mask[:, :6]).past_key_values
        rest = model(ids[:, 6:], attention_mask=mask, past_key_values=cache).logits
    assert float((rest - whole.logits[:, 6:]).norm() / rest.norm()) < 0.3
    assert torch.isfinite(whole.loss)


# --- the plain model


def test_the_plain_model_says_which_one_the_trainer_takes(tmp_path: Path) -> None:
    model = LM(tiny_config("gsa").to_model_config())
    with pytest.raises(
        ValueError, match=r"LM: .*Trainer.* model.save_pretrained\(folder\), then GSAForCausalLM.from_pre"
    ):
        trainer(tmp_path / "run", model, training_rows(2))  # type: ignore[arg-type]
    model.save_pretrained(tmp_path / "model")
    advised = GSAForCausalLM.from_pretrained(tmp_path / "model")
    trainer(tmp_path / "advised", advised, training_rows(2), max_steps=1).train()


def test_all_members_of_the_plain_model_can_be_looked_at() -> None:
    model = LM(tiny_config("gsa").to_model_config())
    assert {"state_size", "config", "lm_head"} <= {name for name, _ in inspect.getmembers(model)}
