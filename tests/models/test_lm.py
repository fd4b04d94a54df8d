"""The language model: shapes, losses, states, refusals, compilation."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import gsa
from gsa.errors import GSAError
from gsa.models import LM, ModelConfig, ModelState
from tests.models.cases import CASES, VOCABULARY, config, difference, ids, model


@pytest.mark.parametrize("case", CASES)
def test_loss_is_that_of_the_next_token(case: str) -> None:
    lm, tokens = model(case), ids(2, 12)
    output = lm(tokens)
    assert output.loss is None
    assert output.state is not None
    trained = lm(tokens, labels=tokens)
    assert trained.logits is None
    assert trained.state is None
    expected = cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(trained.loss, expected)


def test_loss_of_pads_packs_and_states() -> None:
    lm, tokens = model("gsa"), ids(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    rows = [lm(tokens[i : i + 1][:, mask[i].bool()], labels=tokens[i : i + 1][:, mask[i].bool()]).loss for i in (0, 1)]
    expected = (7 * rows[0] + 11 * rows[1]) / 18
    torch.testing.assert_close(lm(tokens, labels=tokens, mask=mask).loss, expected)
    packed = torch.cat([tokens[0, 4:], tokens[1]])[None]
    torch.testing.assert_close(lm(packed, labels=packed, cu_seqlens=torch.tensor([0, 8, 20])).loss, expected)
    carried = lm(tokens[:, 5:], lm(tokens[:, :5]).state, labels=tokens[:, 5:])
    assert carried.state is not None
    expected = cross_entropy(lm(tokens).logits[:, 5:-1].flatten(0, 1), tokens[:, 6:].flatten())
    torch.testing.assert_close(carried.loss, expected)


def test_some_labels_do_not_count() -> None:
    lm, tokens = model("gla"), ids(2, 12)
    labels = tokens.clone()
    labels[:, 3:9] = -100
    expected = cross_entropy(lm(tokens).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(lm(tokens, labels=labels).loss, expected)


def test_embeddings_tied_or_not() -> None:
    tied, untied = model("gsa", tie_word_embeddings=True), model("gsa")
    assert tied.lm_head.weight is tied.model.embeddings.weight
    assert untied.num_parameters - tied.num_parameters == VOCABULARY * 32
    tied(ids(1, 5), labels=ids(1, 5)).loss.backward()
    assert tied.lm_head.weight.grad is not None


def test_fresh_weights() -> None:
    """Matrices have the deviation of the config, last ones of a branch a smaller one; a seed decides them."""
    torch.manual_seed(0)
    lm = LM(ModelConfig(hidden_size=256, num_hidden_layers=8, num_attention_heads=2, vocab_size=500))
    block = lm.model.layers[3]
    for weight, deviation in (
        (block.mixer.q_proj.weight, 0.02),
        (block.mlp.up_proj.weight, 0.02),
        (lm.lm_head.weight, 0.02),
        (block.mixer.o_proj.weight, 0.005),
        (block.mlp.down_proj.weight, 0.005),
    ):
        assert weight.detach().std() == pytest.approx(deviation, rel=0.05)
    assert (block.mixer_norm.weight == 1).all()
    torch.manual_seed(0)
    again = LM(lm.config)
    assert all(torch.equal(a, b) for a, b in zip(lm.parameters(), again.parameters(), strict=True))


def test_a_deep_fresh_model_is_calm() -> None:
    """Logits of a fresh model say little, however deep it is: the first loss is near log(vocabulary)."""
    for mixer in gsa.mixers.MIXERS:
        torch.manual_seed(0)
        lm = LM(ModelConfig(mixer=mixer, hidden_size=64, num_hidden_layers=24, vocab_size=1000))
        tokens = torch.randint(1000, (1, 64))
        assert lm(tokens, labels=tokens).loss.item() == pytest.approx(6.9078, abs=0.3), mixer


@pytest.mark.parametrize("case", ["gsa", "hgrn2", "mamba", "hybrid"])
def test_activation_checkpointing_changes_no_gradient(case: str) -> None:
    lm, tokens = model(case).train(), ids(2, 20)
    lm(tokens, labels=tokens).loss.backward()
    plain = [p.grad.clone() for p in lm.parameters()]
    lm.zero_grad()
    lm.gradient_checkpointing = True
    assert lm.gradient_checkpointing
    saved = 0

    def count(x: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        loss = lm(tokens, labels=tokens).loss
    checkpointed, saved = saved, 0
    loss.backward()
    for name, expected, p in zip(dict(lm.named_parameters()), plain, lm.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected, msg=name)
    lm.gradient_checkpointing = False
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        lm(tokens, labels=tokens)
    assert checkpointed < saved / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_other_precisions(case: str, dtype: torch.dtype) -> None:
    tokens = ids(2, 12)
    expected = model(case)(tokens).logits
    logits = model(case).to(dtype)(tokens).logits
    assert logits.dtype == dtype
    assert difference(logits.to(expected.dtype), expected) < (0.5 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("case", CASES)
def test_autocast(case: str) -> None:
    lm, tokens = model(case), ids(2, 12)
    expected = lm(tokens).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = lm(tokens)
        following = lm(tokens[:, :3], output.state)
        loss = lm(tokens, labels=tokens).loss
    assert difference(output.logits.float(), expected) < 0.5
    assert torch.isfinite(following.logits).all()
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in lm.parameters())


@pytest.mark.parametrize("case", CASES)
def test_the_state_is_of_constant_size(case: str) -> None:
    if case == "attention":
        assert model(case).state_size is None
        return
    lm = model(case)
    short, long = (lm(ids(2, T)).state for T in (10, 100))
    assert short.nbytes == long.nbytes
    assert lm.state_size is not None


def test_states_can_be_selected_repeated_cloned_moved() -> None:
    lm, tokens = model("hybrid"), ids(3, 9)
    state, more = lm(tokens).state, ids(3, 4, seed=2)
    expected = lm(more, state).logits
    assert state.batch_size == 3
    assert "3 sequences" in repr(state)
    order = torch.tensor([2, 0, 2])
    assert difference(lm(more[order], state.select(order)).logits, expected[order]) < 1e-5
    assert difference(lm(more.repeat_interleave(2, 0), state.repeat(2)).logits, expected.repeat_interleave(2, 0)) < 1e-5
    copy = state.clone()
    for layer in state.layers:
        for x in layer.values():
            x.zero_()
    assert difference(lm(more, copy).logits, expected) < 1e-6
    assert copy.to("meta").layers[0]["k"].device.type == "meta"
    assert not any(x.requires_grad for layer in copy.detach().layers for x in layer.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"ids": torch.zeros(3, dtype=torch.int64)},
            r"ids must be an int32 or int64 tensor \[B, T\], got torch.int64 \[3\]",
        ),
        ({"ids": torch.zeros(1, 3)}, "ids must be an int32 or int64 tensor"),
        ({"ids": [[1, 2]]}, "got list"),
        ({"ids": torch.tensor([[1, 50]])}, r"ids must be in 0..49 \(vocab_size 50\), got 1..50"),
        ({"ids": torch.tensor([[-1, 3]])}, "got -1..3"),
        (
            {"labels": torch.zeros(2, 4, dtype=torch.int64)},
            r"labels must be int64 in the shape of ids \[2, 5\], got torch.int64 \[2, 4\]",
        ),
        ({"labels": torch.zeros(2, 5)}, "labels must be int64 in the shape"),
        ({"labels": torch.full((2, 5), 50)}, r"labels must be in 0..49, or -100, got 50"),
        ({"labels": torch.full((2, 5), -1)}, r"labels must be in 0..49, or -100, got -1"),
        ({"cu_seqlens": 5}, r"cu_seqlens must be an int32 or int64 tensor \[N\+1\], got int"),
        ({"cu_seqlens": torch.tensor(5)}, r"got torch.int64 \[\]"),
        ({"mask": torch.ones(2, 4)}, r"mask must be a tensor \[B, T\] = \[2, 5\], got torch.float32 \[2, 4\]"),
        ({"mask": torch.full((2, 5), 2)}, r"mask must hold 1 at tokens and 0 at pads, got \[2\]"),
        ({"cu_seqlens": torch.tensor([0, 10])}, "packs sequences into a batch of 1, but there are 2 rows"),
        ({"state": 3}, "state must be a ModelState, got int"),
        ({"state": ModelState([])}, "state is of a model with 0 layers, this one has 3"),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    with pytest.raises(GSAError, match=message):
        model("gsa")(**{"ids": ids(2, 5), **arguments})


def test_states_of_other_batches_or_models() -> None:
    lm = model("gsa")
    with pytest.raises(GSAError, match=r"LM: layer 0: gsa: state\['k'\] is of 3 sequences, there are 2"):
        lm(ids(2, 5), lm(ids(3, 5)).state)
    with pytest.raises(GSAError, match="LM: layer 0: gsa: state must hold k, v, got S"):
        lm(ids(2, 5), model("gla")(ids(2, 5)).state)
    with pytest.raises(GSAError, match="expected a ModelConfig, got dict"):
        LM({})


def test_no_tokens() -> None:
    lm, nothing = model("hybrid"), ids(2, 0)
    assert lm(nothing).logits.shape == (2, 0, VOCABULARY)
    assert lm(nothing, labels=nothing).loss.isnan()  # a mean of nothing


def test_hooks_of_mixers_run() -> None:
    """What looks at or moves a module's inputs by hooks (accelerate, captures) also sees mixers."""
    lm, seen = model("hybrid"), []
    for block in lm.model.layers:
        block.mixer.register_forward_hook(lambda module, args, output: seen.append(module.options.mixer))
    lm(ids(1, 5))
    assert seen == ["gsa", "gsa", "attention"]


@pytest.mark.parametrize("offset", [-100.0, -16.0, 17.0, 100.0])
def test_bounds_of_hgrn2_stay_below_one(offset: float) -> None:
    lm, tokens = model("hgrn2", num_hidden_layers=12), ids(1, 20)
    with torch.no_grad():
        lm.model.lower_bounds[0] += offset
    loss = lm(tokens, labels=tokens).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in lm.parameters())


def test_bounds_of_hgrn2_grow_over_the_layers() -> None:
    from gsa.mixers.hgrn2 import lower_bounds

    logits = torch.randn(6, 5, dtype=torch.float64)
    bounds, rest = lower_bounds(logits).exp().unbind(1)
    shares = logits.softmax(0)
    torch.testing.assert_close(bounds, shares.cumsum(0) - shares[0])
    torch.testing.assert_close(bounds + rest, torch.ones_like(bounds))
    assert (bounds.diff(dim=0) > 0).all()


def test_no_bounds_where_no_layer_has_one() -> None:
    """The first layer's is 0, and a parameter without a gradient would stop training on several machines."""
    assert not hasattr(model("hgrn2", num_hidden_layers=1).model, "lower_bounds")
    assert not hasattr(model("hybrid", mixer="hgrn2,gsa*2").model, "lower_bounds")


def test_attention_that_goes_on_holds_no_square_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    from gsa.mixers import attend

    lm, tokens = model("attention"), ids(2, 60)
    expected = lm(tokens).logits
    whole, sizes = attend._sdpa, []

    def spy(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object = None, causal: bool = False
    ) -> torch.Tensor:
        sizes.append(0 if mask is None else mask.shape[-2])
        return whole(q, k, v, mask, causal)

    monkeypatch.setattr(attend, "_sdpa", spy)
    monkeypatch.setattr(attend, "QUERIES", 8)
    found = lm(tokens[:, 10:], lm(tokens[:, :10], lm.init_state(2)).state).logits
    assert difference(found, expected[:, 10:]) < 1e-4
    assert max(sizes) == 8
    sizes.clear()
    lm(tokens, lm.init_state(2))
    assert max(sizes) == 0


def test_a_window_bounds_the_state_of_packed_sequences() -> None:
    lm = model("attention, window")
    state = lm(ids(1, 60), cu_seqlens=torch.tensor([0, 50, 52, 60])).state
    assert all(layer["k"].shape[:2] == (3, 4) for layer in state.layers)


def test_the_config_says_what_a_layer_is() -> None:
    hybrid = config("hybrid", num_hidden_layers=7)
    assert [layer.mixer for layer in hybrid.layers] == ["gsa", "gsa", "attention"] * 2 + ["gsa"]
    assert hybrid.layers[2].window == 4


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiles_whole(case: str) -> None:
    """torch.compile of the whole model, training and inference, padded and packed, without a graph break.

    Code is generated, by inductor, for one of them; the others are traced, which is what can fail for each alone.
    """
    lm, tokens = model(case), ids(2, 21)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    for backend, arguments in (
        ("aot_eager", {}),
        ("aot_eager", {"labels": tokens}),
        ("inductor", {"labels": tokens, "mask": mask}),
        ("aot_eager", {"ids": tokens[:1], "labels": tokens[:1], "cu_seqlens": torch.tensor([0, 9, 21])}),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(lm, fullgraph=True, backend=backend)
        arguments = {"ids": tokens, **arguments}
        found = compiled(**arguments)
        expected = lm(**arguments)
        if expected.loss is None:
            assert difference(found.logits, expected.logits) < 1e-4
            continue
        torch.testing.assert_close(found.loss, expected.loss)
        gradients = torch.autograd.grad(found.loss, list(lm.parameters()))
        for name, a, b in zip(
            dict(lm.named_parameters()),
            gradients,
            torch.autograd.grad(expected.loss, list(lm.parameters())),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=name)


def test_compiles_whole_quickly() -> None:
    """The same for the paper's model alone, without generating code."""
    torch._dynamo.reset()
    lm, tokens = model("hybrid"), ids(2, 21)
    compiled = torch.compile(lm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, labels=tokens).loss, lm(tokens, labels=tokens).loss)
    state = lm(tokens).state.detach()
    assert difference(compiled(tokens[:, :1], state).logits, lm(tokens[:, :1], state).logits) < 1e-5
