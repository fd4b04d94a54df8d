"""A reader of transformers' models says what a plain loop says, with their caches only where those are right."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from gsa.errors import GSAError, OutOfMemory
from gsa.eval.foreign import ForeignReader
from gsa.eval.foreign_model import ForeignModel
from gsa.eval.foreign_tokenizer import ForeignTokenizer
from gsa.eval.reader import Continuation, is_ours, open_reader
from tests.eval.cases import CLOSE, apart, plain, requests, scores

VOCABULARY = 97
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}


class Numbers(ForeignTokenizer):
    """Ids as numbers."""

    def __init__(self) -> None:
        self.eos_id, self.bos_id, self.vocab_size = 0, None, VOCABULARY

    def text(self, ids: Any) -> str:
        return "".join(f"{id_} " for id_ in ids)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(**SMALL, **heads, max_position_embeddings=256)).eval()


def mamba() -> MambaForCausalLM:
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(**SMALL, state_size=4)).eval()


def reader_of(model: Any, max_length: int | None = None) -> ForeignReader:
    return ForeignReader(ForeignModel(model, "fp32"), Numbers(), "small", max_length)


@pytest.mark.parametrize("make", [llama, mamba])
def test_scores_are_those_of_a_plain_loop(make: Any) -> None:
    model = make()
    reader, asked = reader_of(model), requests(VOCABULARY)
    expected = plain(lambda ids: model(ids).logits, asked)
    for batch_size, reuse in ((1, True), (8, True), (32, True), (8, False)):
        found = scores(reader, asked, batch_size, reuse)
        assert apart(found, expected) < CLOSE, (batch_size, reuse)
        assert [score.greedy for score in found] == [score.greedy for score in expected]


def test_caches_are_used_only_where_they_are_right() -> None:
    """transformers' Mamba forgets the state when several tokens follow, which is noticed, and told."""
    assert reader_of(llama()).about["caches"] == "copied"
    assert reader_of(mamba()).about["caches"] == "not copied: every text is read whole"
    assert (reader_of(llama()).rereads, reader_of(mamba()).rereads) == (False, True)
    model = ForeignModel(llama(), "fp32")
    assert (model.caches, model.steps, model.left_pads) == (True, True, True)
    broken = llama()
    forward = broken.forward

    def forgets_pads(input_ids=None, past_key_values=None, use_cache=None, attention_mask=None):
        return forward(input_ids, past_key_values=past_key_values, use_cache=use_cache)

    broken.forward = forgets_pads
    model = ForeignModel(broken, "fp32")
    assert (model.caches, model.steps, model.left_pads) == (True, True, False)


def test_only_what_a_model_cannot_do_counts_as_that() -> None:
    """For want of memory, nothing is known of a model; nor if there is a fault of ours."""
    model = ForeignModel(llama(), "fp32")
    for error, expected in (
        (TypeError("no cache"), None),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfMemory),
        (MemoryError(), OutOfMemory),
        (ZeroDivisionError(), ZeroDivisionError),
    ):

        def read(error: Exception = error) -> torch.Tensor:
            raise error

        if expected is None:
            assert not model._is_right(read)
        else:
            with pytest.raises(expected):
                model._is_right(read)


@pytest.mark.parametrize("make", [llama, mamba])
def test_texts_are_greedy_whatever_else_is_written(make: Any) -> None:
    model = make()
    reader = reader_of(model)
    prompts = [list(request.context) for request in requests(VOCABULARY)[::6]]
    expected = {}
    for number, prompt in enumerate(prompts):
        said: list[int] = []
        while len(said) < 8 and not (said and said[-1] in reader._model.ends):
            said.append(int(model(torch.tensor([[*prompt, *said]])).logits[0, -1].argmax()))
        expected[number] = reader.tokenizer.text([id_ for id_ in said if id_ not in reader._model.ends])
    for batch_size in (1, 4):
        assert dict(reader.generate(prompts, max_tokens=8, until=[], batch_size=batch_size)) == expected
    stop = expected[0][2:6]
    found = dict(reader.generate(prompts, max_tokens=8, until=[stop], batch_size=4))
    assert found == {number: text.split(stop)[0] for number, text in expected.items()}


@pytest.mark.parametrize("make", [llama, mamba])
def test_log_probs_go_on_from_a_state(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.eval.foreign.PIECE", 8)
    model = make()
    ids = torch.randint(VOCABULARY, (30,)).tolist()
    rows = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    expected = rows.gather(1, torch.tensor(ids)[1:, None])[:, 0]
    reader = reader_of(model)
    for cut in (1, 9, 30):
        first, state = reader.log_probs(ids[:cut])
        for _ in range(2):  # the state stays as it is
            rest, _ = reader.log_probs(ids[cut:], state)
            torch.testing.assert_close(torch.cat([first, rest]).double(), expected, atol=1e-4, rtol=0)


def test_contexts_are_cut_to_the_positions_of_a_model() -> None:
    model = llama()
    reader = reader_of(model, 20)
    asked = [Continuation(range(40), (1, 2, 3)), Continuation(range(18), (1, 2, 3))]
    expected = plain(lambda ids: model(ids).logits, [Continuation(range(22, 40), (1, 2, 3)), asked[1]])
    assert apart(scores(reader, asked), expected) < CLOSE
    assert reader_of(model).max_length == 256
    assert reader_of(mamba()).max_length is None


def test_a_folder_of_transformers_is_read(tmp_path: Path) -> None:
    from gsa.data.tokenizer import load_tokenizer

    torch.manual_seed(0)
    sizes = {**SMALL, "vocab_size": 300, "intermediate_size": 64, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=256, bos_token_id=None)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    load_tokenizer("bytes").save(tmp_path)
    assert not is_ours(tmp_path)
    assert is_ours("gsa-tiny")
    reader = open_reader(tmp_path)
    assert (reader.about["kind"], reader.about["model_type"], reader.about["weights"]) == (
        "transformers",
        "llama",
        "bf16",
    )
    exact = open_reader(tmp_path, dtype="fp32")
    assert exact.tokenizer.encode("Hé", special=True) == [72, 195, 169]
    assert exact.about["fingerprint"] != reader.about["fingerprint"]
    assert exact.about["fingerprint"] == open_reader(tmp_path, dtype="fp32").about["fingerprint"]
    wide = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    asked = requests(256)[:4]
    assert apart(scores(exact, asked), plain(lambda ids: wide(ids).logits, asked)) < CLOSE
    for options, message in [
        ({"weights": "int8"}, "a model of transformers, for which dtype is chosen"),
        ({"dtype": "fp7"}, "unknown dtype 'fp7'; expected one of auto, fp32, bf16, fp16"),
    ]:
        with pytest.raises(GSAError, match=message):
            open_reader(tmp_path, **options)


def test_what_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(GSAError, match="transformers cannot load"):
        open_reader(tmp_path)
    with pytest.raises(GSAError, match="there is no file"):
        open_reader(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF and no more")
    with pytest.raises(GSAError, match="transformers cannot load"):
        open_reader(tmp_path / "model.gguf")
