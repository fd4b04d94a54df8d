"""Inference where there is a GPU: dense weights, Triton's step, and what is said where there is none.

On a CPU the same layers run with kernels in Triton's interpreter; `pytest --device cuda` runs them on a GPU.
"""

from pathlib import Path

import pytest
import torch

from gsa import LM, Engine, Sampling
from gsa.cli import main
from gsa.devices import find_device, use_device
from gsa.errors import GSAError
from gsa.infer import Model
from gsa.infer.dense import DenseLinear
from gsa.infer.layers import use_dense_layers
from gsa.infer.model import chosen_device
from gsa.infer.runners import make_runner
from gsa.infer.torch_runner import TorchRunner
from gsa.models.state import ModelState
from gsa.ops import use_backend
from tests.device import DEVICE
from tests.models.cases import ids, model


def dense(lm: LM, weights: str) -> Model:
    """A model as it is on a GPU, on whatever device is tested."""
    if DEVICE.type != "cpu":
        return Model.load(lm, weights, device=str(DEVICE))
    loaded = Model.load(lm, weights)
    copy = LM(lm.config).eval()
    copy.load_state_dict(lm.state_dict())
    nbytes = use_dense_layers(copy.requires_grad_(False), weights)
    return Model(copy, weights, weights, loaded.fingerprint, nbytes, lm.num_parameters)


def read_and_stepped(runner: TorchRunner, tokens: torch.Tensor, prompt: int) -> tuple[torch.Tensor, ModelState]:
    """Logits behind a prompt and behind each token after it, and the last state."""
    first, state = runner.read(tokens[:prompt], None)
    runner.put(0, state)
    logits = [first, *(runner.step([token], [0])[0] for token in tokens[prompt:].tolist())]
    return torch.stack(logits).cpu(), runner.take(0).to("cpu")


@pytest.mark.any_device
@pytest.mark.parametrize("case", ["gsa", "gla"])
def test_dense_weights_and_triton_give_what_the_cpu_gives(case: str) -> None:
    lm, tokens = model(case, num_hidden_layers=2), ids(22)
    here = TorchRunner(dense(lm, "fp32"), 1)
    with use_backend("triton"):
        found, state = read_and_stepped(here, tokens, 20)
    expected, other = read_and_stepped(TorchRunner(Model.load(lm, "fp32", device="cpu"), 1), tokens, 20)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for name, x in state.tensors().items():
        torch.testing.assert_close(x, other.tensors()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.any_device
def test_bf16_weights_stay_dense() -> None:
    lm = model("gsa", tie_word_embeddings=True)
    loaded, exact = dense(lm, "bf16"), dense(lm, "fp32")
    layers = [layer for layer in loaded.lm.modules() if isinstance(layer, DenseLinear)]
    assert layers
    assert all(layer.dense_weight.dtype == torch.bfloat16 for layer in layers)
    assert loaded.lm.lm_head.dense_weight is loaded.lm.model.embeddings.dense_weight
    assert loaded.nbytes < 0.55 * exact.nbytes
    found, expected = (make_torch(m).read(ids(40), None) for m in (loaded, exact))
    assert (found[0] - expected[0]).norm() < 0.03 * expected[0].norm()
    assert all(x.dtype == torch.float32 for x in found[1].tensors().values())


def make_torch(loaded: Model) -> TorchRunner:
    return TorchRunner(loaded, 1)


def test_a_model_off_the_cpu_is_run_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = dense(model("gsa"), "bf16")
    monkeypatch.setattr(Model, "device", torch.device("cuda", 0))
    assert isinstance(make_runner(loaded, 1), TorchRunner)


def test_the_states_of_the_same_sequences_are_not_copied_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, joined = Model.load(model("gsa")), []
    cat = ModelState.cat
    monkeypatch.setattr(ModelState, "cat", lambda states: joined.append(len(states)) or cat(states))
    runner, alone = TorchRunner(loaded, 3), TorchRunner(loaded, 1)
    for place in range(3):
        runner.put(place, loaded.init_state())
    alone.put(0, loaded.init_state())
    expected = [alone.step([token], [0]) for token in (5, 6, 7, 8)]
    joined.clear()
    found = [runner.step([token, 1, 2], [0, 1, 2]) for token in (5, 6)]
    found += [runner.step([token, 3], [0, 2]) for token in (7, 8)]  # one has left
    assert joined == [3, 2]
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine[:1], other)


def test_what_only_cpus_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as on a machine with a GPU
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert chosen_device("auto", "bf16", "auto") == chosen_device("cuda", "bf16", "auto") == gpu
    assert chosen_device("auto", "bf16", "auto", best=cpu) == cpu  # where an LM is
    for weights, compute in (("int8", "auto"), ("int4", "auto"), ("bf16", "fp32")):
        assert chosen_device("auto", weights, compute) == chosen_device("cpu", weights, compute) == cpu
    with pytest.raises(GSAError, match="int8 weights are for CPUs, and the device is cuda; choose the device cpu"):
        chosen_device("cuda", "int8", "auto")
    with pytest.raises(GSAError, match="a choice of compute is for CPUs, and the device is cuda"):
        chosen_device("cuda", "auto", "fp32")


@pytest.mark.parametrize(
    "name", ["tpu", "cuda:x", "cuda:", "cpu:1", "cpu:", "auto:0", "auto:", "cuda:-1", "cuda:1:2", "cuda:99999", ""]
)
def test_unknown_devices(name: str) -> None:
    with pytest.raises(GSAError, match=rf"load: unknown device '{name}'; expected one of auto, cpu, cuda"):
        find_device(name, "load")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    assert find_device("auto", "load") == torch.device("cpu")
    for make, name in (
        (lambda: Model.load("gsa-tiny", device="cuda"), "cuda"),
        (lambda: Engine("gsa-tiny", device="cuda:1"), "cuda:1"),
    ):
        with pytest.raises(GSAError, match=f"Model: device {name} was asked for, and torch finds no GPU"):
            make()


def test_one_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as on a machine with two
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("cuda:1", "load") == find_device("cuda:01", "load") == torch.device("cuda", 1)
    with pytest.raises(GSAError, match="load: there is no GPU cuda:2; there are cuda:0 to cuda:1"):
        find_device("cuda:2", "load")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(GSAError, match="load: there is no GPU cuda:1; the only one is cuda:0"):
        find_device("cuda:1", "load")
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    for name in ("cpu", "cuda", "cuda:0"):
        use_device(torch.device(name))
    assert used == [torch.device("cuda", 0)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "command",
    [["generate", "a"], ["chat", "--model", "gsa-tiny"], ["state", "save", "--file", "text.txt", "--out", "a.state"]],
)
def test_commands_name_devices(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a text")
    for name, message in (
        ("cuda:1", "Model: device cuda:1 was asked for, and torch finds no GPU that it can use"),
        ("cuda:x", "Model: unknown device 'cuda:x'; expected one of auto, cpu, cuda, or cuda:1 and the like"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--device", name])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_an_engine_says_where_its_model_is() -> None:
    loaded = Model.load(model("gsa"))
    with pytest.raises(GSAError, match="engine: device 'cuda' was asked for, the model is on 'cpu'"):
        Engine(loaded, device="cuda")
    assert len(Engine(loaded, device="cpu").generate([1, 2], Sampling(max_tokens=3)).tokens) == 3
