"""What is promised of every engine, for inputs nobody thought of."""

import pytest
import torch
from hypothesis import strategies as st

from gsa.ops import SlotState, gated_linear_attention, gated_slot_attention, gated_slot_attention_step, use_backend
from tests.device import DEVICE
from tests.ops.cases import GATES, Case, assert_close, for_every_engine, linear_inputs, slot_inputs, slot_results

pytestmark = pytest.mark.any_device
gates = st.sampled_from(list(GATES))
sizes = st.integers(1, 9)


@st.composite
def cases(draw: st.DrawFn, **fixed: object) -> Case:
    drawn = {
        "B": draw(st.integers(1, 3)),
        "T": draw(st.integers(0, 140)),
        "H": draw(st.integers(1, 3)),
        "R": draw(st.integers(1, 3)),
        "K": draw(sizes),
        "V": draw(sizes),
        "M": draw(sizes),
        "gate": draw(gates),
        "write": draw(st.booleans()),
        "initial": draw(st.booleans()),
        "readout": draw(st.sampled_from(["softmax", "identity", "swish"])),
    }
    return Case(**(drawn | fixed))  # type: ignore[arg-type]


def _call(x: dict, case: Case, engine: str, rows: slice, state: SlotState | None) -> tuple[torch.Tensor, SlotState]:
    o, state = gated_slot_attention(
        *(x[n][:, rows] for n in "qkvg"),
        x["s"][:, rows] if case.write else None,
        scale=case.scale,
        readout=case.readout,
        initial_state=state,
        output_final_state=True,
        backend=engine,
    )
    assert state is not None
    return o, state


@for_every_engine(case=cases(), data=st.data())
def test_any_split_gives_the_same_answer(engine: str, case: Case, data: st.DataObject) -> None:
    x = slot_inputs(case)
    whole = slot_results(case, x, engine, gradients=False)
    cuts = sorted(data.draw(st.lists(st.integers(0, case.T), max_size=4)))
    state = SlotState(x["state_k"], x["state_v"]) if case.initial else None
    parts = []
    for start, stop in zip([0, *cuts], [*cuts, case.T], strict=True):
        o, state = _call(x, case, engine, slice(start, stop), state)
        parts.append(o)
    assert state is not None
    assert_close({"o": torch.cat(parts, 1), "final_k": state.k, "final_v": state.v}, whole, torch.float64)


@for_every_engine(case=cases(B=1), lengths=st.lists(st.integers(0, 90), max_size=5))
def test_any_packing_gives_the_same_answer_as_single_calls(engine: str, case: Case, lengths: list[int]) -> None:
    case = Case(**{**vars(case), "lengths": tuple(lengths)})
    x = slot_inputs(case)
    packed = slot_results(case, x, engine, gradients=False)
    start, outputs, states = 0, [x["v"].new_zeros(1, 0, case.H * case.R, case.V)], []
    for n, length in enumerate(lengths):
        state = SlotState(x["state_k"][n : n + 1], x["state_v"][n : n + 1]) if case.initial else None
        o, state = _call(x, case, engine, slice(start, start + length), state)
        outputs.append(o)
        states.append(state)
        start += length
    single = {"o": torch.cat(outputs, 1)}
    if states:
        single |= {"final_k": torch.cat([s.k for s in states]), "final_v": torch.cat([s.v for s in states])}
    assert_close({name: packed[name] for name in single}, single, torch.float64)


@for_every_engine(case=cases(), inplace=st.booleans())
def test_a_loop_of_steps_gives_the_same_answer(engine: str, case: Case, inplace: bool) -> None:
    x = slot_inputs(case)
    whole = slot_results(case, x, engine, gradients=False)
    if case.initial:
        state = SlotState(x["state_k"].clone(), x["state_v"].clone())
    else:
        state = SlotState(torch.zeros_like(whole["final_k"]), torch.zeros_like(whole["final_v"]))
    rows = [torch.zeros_like(whole["o"][:, 0:0])]
    for t in range(case.T):
        with use_backend(engine):
            o, state = gated_slot_attention_step(
                *(x[n][:, t] for n in "qkvg"),
                x["s"][:, t] if case.write else None,
                state=state,
                scale=case.scale,
                readout=case.readout,
                inplace=inplace,
            )
        rows.append(o[:, None])
    assert_close({"o": torch.cat(rows, 1), "final_k": state.k, "final_v": state.v}, whole, torch.float64)


@for_every_engine(
    case=cases(write=False),
    gk=st.sampled_from([None, "key", "head"]),
    gv=st.sampled_from([None, "value"]),
    share=st.floats(0, 1),
)
def test_any_split_of_linear_attention(engine: str, case: Case, gk: str | None, gv: str | None, share: float) -> None:
    x = linear_inputs(case, gk, gv)
    cut = round(share * case.T)

    def call(rows: slice, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        o, state = gated_linear_attention(
            *(x[n][:, rows] for n in "qkv"),
            gk=x["gk"][:, rows] if gk else None,
            gv=x["gv"][:, rows] if gv else None,
            initial_state=state,
            output_final_state=True,
            backend=engine,
        )
        assert state is not None
        return o, state

    whole, final = call(slice(None), x.get("state"))
    first, state = call(slice(0, cut), x.get("state"))
    second, state = call(slice(cut, None), state)
    assert_close({"o": torch.cat((first, second), 1), "final": state}, {"o": whole, "final": final}, torch.float64)


@for_every_engine(case=cases(B=1, R=1), pad=st.integers(1, 70))
def test_tokens_that_neither_write_nor_forget_change_nothing(engine: str, case: Case, pad: int) -> None:
    """Padding with g = 0 and s = 0 on either side leaves outputs and state as they were."""
    case = Case(**{**vars(case), "write": True})
    x = slot_inputs(case)
    exact = slot_results(case, x, engine, gradients=False)
    padded = {}
    for name, tensor in x.items():
        if name.startswith("state"):
            padded[name] = tensor
            continue
        noise = torch.zeros if name in ("g", "s") else torch.randn
        edge = [noise(1, pad, *tensor.shape[2:], dtype=tensor.dtype).to(DEVICE) for _ in range(2)]
        padded[name] = torch.cat((edge[0], tensor, edge[1]), 1)
    actual = slot_results(Case(**{**vars(case), "T": case.T + 2 * pad}), padded, engine, gradients=False)
    actual["o"] = actual["o"][:, pad : pad + case.T]
    assert_close(actual, exact, torch.float64)
