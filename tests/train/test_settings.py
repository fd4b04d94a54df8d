"""Wrong settings end with a sentence before anything starts; the shipped recipes are the paper's."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gsa.cli import main
from gsa.data.prepare import prepare
from gsa.data.tokenizer_train import train_tokenizer
from gsa.errors import GSAError
from gsa.models import preset
from gsa.recipes import names, recipe
from gsa.train.plan import make_plan
from gsa.train.run import train
from gsa.train.settings import TrainSettings, tokens_per_step, total_steps, warmup_steps
from tests.train.runs import ALICE, options, prepared, run_settings

RECIPES = recipe("gsa-tiny").parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    prepared(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "model", "tokens", "warmup"),
    [
        ("340m-10b", "gsa-340m", 10 * 10**9, 10**9),
        ("1.3b-100b", "gsa-1.3b", 100 * 10**9, 10**9),
        ("2.7b-100b", "gsa-2.7b", 100 * 10**9, 10**9),
        ("finetune-7b", None, 20 * 10**9, None),
    ],
)
def test_the_papers_recipes(name: str, model: str | None, tokens: int, warmup: int | None) -> None:
    settings = TrainSettings(**yaml.safe_load((RECIPES / f"{name}.yaml").read_text()))
    assert settings.length == 2048
    assert settings.tokenizer == "mistral"
    assert settings.weight_decay == 0.01
    steps = total_steps(settings, 0)
    assert steps * tokens_per_step(settings) == pytest.approx(tokens, rel=1e-3)
    if model is not None:
        assert settings.model == model
        assert preset(model).vocab_size == 32000
        assert (settings.lr, settings.min_lr) == (3e-4, 3e-5)
        assert warmup_steps(settings, steps) * tokens_per_step(settings) == pytest.approx(warmup, rel=1e-3)
    else:
        assert settings.lr == 3e-5
        assert settings.warmup_steps == 1000
        assert tokens_per_step(settings) == 2 * 2**20


def test_every_recipe_is_valid() -> None:
    recipes = sorted(RECIPES.glob("*.yaml"))
    assert len(recipes) >= 5
    for path in recipes:
        TrainSettings(**yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": float("nan")}, "train: lr must be finite, got nan"),
        ({"lr": -1.0}, "train: lr must be above 0, got -1.0"),
        ({"lr": 1e-4, "min_lr": 1e-3}, "min_lr 0.001 is above lr 0.0001"),
        ({"steps": 0}, "train: steps must be at least 1"),
        ({"tokens": 100}, "give one of steps, tokens and epochs"),
        ({"steps": None}, "give one of steps, tokens and epochs"),
        ({"warmup_tokens": 5}, "warmup_steps or warmup_tokens"),
        ({"data": None}, "data is missing: give --data"),
        ({"out": ""}, "out is missing"),
        ({"beta2": 1.0}, "beta2 must be below 1"),
        ({"ema": 1.5}, "ema must be below 1"),
        ({"precision": "int8"}, "precision must be one of auto, fp32, bf16, fp16"),
        ({"engine": "horse"}, "engine must be one of"),
        ({"zero_stage": 4}, "zero_stage must be at most 3, got 4"),
        ({"model_options": "num_slots"}, "model_options must be"),
    ],
)
def test_settings_that_cannot_be(folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(GSAError) as raised:
        run_settings(folder, **change)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "nowhere"}, "nowhere"),
        ({"model": "gsa-tini"}, "did you mean 'gsa-tiny'?"),
        ({"model_options": {"num_slot": 3}}, "unknown field 'num_slot' (did you mean 'num_slots'?)"),
        ({"model_options": {"vocab_size": 100}}, "tokens of 'bytes' up to 256, the model knows 100"),
        ({"tokenizer": "nowhere/tokenizer.json"}, "nowhere"),
        ({"length": 10**6}, "fewer than one row of 1000000"),
        ({"warmup_steps": 100}, "the warm-up of 100 steps is longer than the run of 12"),
    ],
)
def test_plans_that_cannot_be(folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(GSAError) as raised:
        make_plan(run_settings(folder, **change))
    assert message in str(raised.value)


def test_a_tokenizer_that_does_not_match_is_refused(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(ALICE.read_text())
    train_tokenizer([str(text)], 300, tmp_path / "bpe")
    prepare([str(text)], str(tmp_path / "bpe"), tmp_path / "other", processes=1, progress=False)
    for change in ({"eval_data": str(tmp_path / "other")}, {"tokenizer": str(tmp_path / "bpe")}):
        with pytest.raises(GSAError, match=r"does not match: data .* was prepared with 'bytes'"):
            make_plan(run_settings(folder, **change))
    assert make_plan(run_settings(folder, tokenizer="bytes")).steps == 12


def test_out_must_be_a_place_for_a_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    for out, message in ((tmp_path / "letter.txt", "is a file"), (tmp_path, "other files in it")):
        with pytest.raises(GSAError, match=message):
            make_plan(run_settings(folder, str(out)))


def test_the_vocabulary_of_a_preset_follows_the_tokenizer(folder: Path) -> None:
    assert make_plan(run_settings(folder)).config.vocab_size == 320


def test_a_model_can_be_a_file_of_its_config(folder: Path, tmp_path: Path) -> None:
    config = preset("gla-tiny")
    (tmp_path / "model.json").write_text(config.to_json())
    plan = make_plan(run_settings(folder, model=str(tmp_path / "model.json"), model_options={"hidden_size": 64}))
    assert (plan.config.mixer, plan.config.hidden_size, plan.config.vocab_size) == ("gla", 64, config.vocab_size)


def command(capsys: pytest.CaptureFixture, *args: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["train", *args])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    return (code, *capsys.readouterr())


def test_the_command_reads_a_recipe_and_options_win(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(options(folder, str(tmp_path / "run"))))
    code, out, err = command(capsys, "--steps", "3", "--config", str(file), "--batch_size", "2", "--no-keep-best")
    assert code == 0, err
    outcome = json.loads(out)
    assert outcome["begin"] == 0
    assert (outcome["step"], outcome["tokens"], outcome["reason"]) == (3, 3 * 2 * 64, "finished")


@pytest.mark.parametrize(("args", "steps"), [(("--tokens", "1000"), 4), (("--epochs=0.1",), 24), (("--steps", "5"), 5)])
def test_an_option_wins_over_a_recipes_other_way_to_say_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, args: tuple[str, ...], steps: int
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(options(folder, str(tmp_path / "run"), warmup_steps=0)))
    code, out, err = command(capsys, "--config", str(file), "--dry-run", *args)
    assert code == 0, err
    assert json.loads(out)["steps"] == pytest.approx(steps, abs=2)


def test_several_processes_do_not_share_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = TrainSettings(**{**options(folder, str(tmp_path / "run")), "device": "cuda:1"})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(GSAError, match="device cuda:1 is one GPU, and a launcher started 2 processes; with the device"):
        train(settings)


@pytest.mark.parametrize(
    ("text", "args", "message"),
    [
        ("lrr: 1\n", (), "lrr"),
        ("lr: .nan\n", (), "lr must be finite"),
        ("lr: fast\n", (), "fast"),
        ("steps: [1\n", (), "did not find expected"),
        ("", ("--lr", "nan"), "nan"),
        ("", ("--learning-rate", "1"), "--learning-rate"),
        ("", ("--data", "nowhere"), "nowhere"),
        ("", ("--device", "cuda"), "no GPU that it can use"),
        ("", ("--device", "cuda:1"), "device cuda:1 was asked for, and torch finds no GPU that it can use"),
        ("device: gpu\n", (), "train: unknown device 'gpu'; expected one of auto, cpu, cuda, or cuda:1 and the like"),
        (
            "",
            ("--micro-batch-size", "3"),
            "train: batch_size 4 must be a multiple of",
        ),
    ],
)
def test_mistakes_in_a_recipe_or_option(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, text: str, args: tuple[str, ...], message: str
) -> None:
    given = {name: value for name, value in options(folder, str(tmp_path / "run")).items() if name not in text}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(given) + text)
    code, _, err = command(capsys, "--config", str(file), *args)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_the_settings_can_be_printed_as_a_recipe(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(options(folder, str(tmp_path / "run"))))
    for option in ("--print_config", "--print-config"):
        code, out, err = command(capsys, "--config", str(file), "--lr", "0.5", option)
        assert code == 0, err
        assert TrainSettings(**yaml.safe_load(out)).lr == 0.5


@pytest.mark.parametrize(
    ("args", "data", "eval_data"),
    [
        ((), "data/books", "data/thursday"),
        (("--data", "mine"), "mine", None),
        (("--data=mine", "--eval-data", "other"), "mine", "other"),
        (("--data", "mine", "--config", "FILE"), "mine", "of the file"),
    ],
)
def test_the_evaluation_of_a_recipe_goes_with_its_own_data(
    tmp_path: Path, capsys: pytest.CaptureFixture, args: tuple[str, ...], data: str, eval_data: str | None
) -> None:
    file = tmp_path / "more.yaml"
    file.write_text("eval_data: of the file\n")
    given = [str(file) if arg == "FILE" else arg for arg in args]
    code, out, err = command(capsys, *given, "--recipe", "gsa-tiny", "--print-config")
    assert code == 0, err
    found = yaml.safe_load(out)
    assert (found["data"], found["eval_data"]) == (data, eval_data)


def test_a_second_recipe_is_refused(capsys: pytest.CaptureFixture) -> None:
    code, _, err = command(capsys, "--recipe", "gsa-tiny", "--recipe=gsa-tiny")
    assert (code, "--recipe is given 2 times (gsa-tiny, gsa-tiny), expected one recipe" in err) == (2, True)


def test_a_missing_recipe_is_said(capsys: pytest.CaptureFixture) -> None:
    code, _, err = command(capsys, "--config", "nowhere.yaml")
    assert code == 2
    assert "nowhere.yaml" in err


def test_a_dry_run_tells_and_starts_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(options(folder, str(tmp_path / "run"), json=False)))
    code, out, err = command(capsys, "--config", str(file), "--dry-run")
    assert code == 0, err
    for word in ("parameters", "memory", "tokens", "12 steps", "time"):
        assert word in out
    assert not (tmp_path / "run").exists()
    code, out, _ = command(capsys, "--config", str(file), "--dry-run", "--json")
    assert json.loads(out)["steps"] == 12


def test_a_recipe_of_the_package_by_name(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Options win over it, wherever they stand."""
    given = ("--steps", "3", "--batch-size", "4", "--recipe", "gsa-tiny", "--print-config")
    code, out, err = command(capsys, *given)
    assert (code, err) == (0, "")
    found, written = yaml.safe_load(out), yaml.safe_load(recipe("gsa-tiny").read_text())
    assert (found["steps"], found["epochs"], found["batch_size"]) == (3, None, 4)
    for name in ("lr", "precision", "data", "length"):
        assert found[name] == written[name]
    assert command(capsys, "--recipe=340m-10b", "--print-config")[1].startswith("model: gsa-340m")


def test_recipes_are_listed(capsys: pytest.CaptureFixture) -> None:
    assert names() == ["1.3b-100b", "2.7b-100b", "340m-10b", "finetune-7b", "gsa-tiny"]
    assert command(capsys, "--recipe", "gsa-tinny")[2] == (
        "gsa: train: there is no recipe 'gsa-tinny'; did you mean gsa-tiny? expected one of 1.3b-100b, 2.7b-100b, "
        "340m-10b, finetune-7b, gsa-tiny; a file of your own goes behind --config\n"
    )
    assert "gsa train: --recipe needs a value" in command(capsys, "--recipe")[2]
    for name in names():
        assert name in command(capsys, "--help")[1]
