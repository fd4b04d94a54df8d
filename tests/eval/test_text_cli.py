"""`gsa eval --text` and `gsa probe`, as one types them, with the model of the package."""

import json
from pathlib import Path

import pytest

from gsa.eval.results import load_result
from tests.cli.running import run

ALICE = Path(__file__).parent.parent / "material" / "alice.txt"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


SHORT = ("--lengths", "3", "--samples", "2")
RUNS: dict[str, tuple[tuple[str | Path, ...], str]] = {
    "perplexity-alice.txt-limit=200": (("eval", "gsa-tiny", "--text", ALICE, "--limit-tokens", "200"), "bits_per_byte"),
    "lengths-alice.txt-lengths=64-128-last=32": (
        ("eval", "gsa-tiny", "--text", ALICE, "--lengths", "64,128", "--last=32"),
        "loss_128",
    ),
    "mqar-lengths=3-samples=2": (("probe", "mqar", "gsa-tiny", *SHORT), "candidates"),
    "phonebook-lengths=3-samples=2": (("probe", "phonebook", "gsa-tiny", *SHORT), "exact"),
    "needle-lengths=200-samples=1-depths=50": (
        ("probe", "needle", "gsa-tiny", "--lengths", "200", "--depths", "50", "--samples", "1"),
        "found",
    ),
    "copy-lengths=3-samples=2-form=letters": (("probe", "copy", "gsa-tiny", *SHORT, "--form", "letters"), "exact"),
}
"""What is typed, and the main metric, by the name of the result file."""


@pytest.mark.parametrize("file", RUNS)
def test_results(capsys: pytest.CaptureFixture, file: str) -> None:
    args, main = RUNS[file]
    code, out, err = run(capsys, *args, "--json", "--plot", "chart.png")
    assert code == 0, err
    result = load_result(Path("evaluations", "gsa-tiny", f"{file}.json"))
    assert json.loads(out) == result
    assert (result["main"], result["model"]["name"]) == (main, "gsa-tiny")
    assert Path("chart.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in Path("evaluations", "gsa-tiny").iterdir()] == [f"{file}.json"]


def test_markdown(capsys: pytest.CaptureFixture) -> None:
    _, out, _ = run(capsys, "eval", "gsa-tiny", "--text", ALICE, "--limit-tokens", "40", "--markdown")
    assert out.startswith("**gsa-tiny: alice.txt**\n\n| tokens before | tokens | loss (nats) | perplexity |\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("eval", "gsa-tiny"), "expected a model and either --tasks or --text"),
        (("eval", "gsa-tiny", "--text", "a.txt", "--tasks", "piqa"), "expected a model and either --tasks or --text"),
        (("eval", "gsa-tiny", "--tasks", "piqa", "--stride", "3"), "eval: --stride goes with --text"),
        (("eval", "gsa-tiny", "--tasks", "piqa", "--samples", "3"), "eval: --samples goes with --text"),
        (("eval", "gsa-tiny", "--text", "a.txt", "--shots", "0"), "eval: --shots goes with --tasks"),
        (("eval", "gsa-tiny", "--text", "a.txt", "--batch-size", "3"), "eval: --batch-size goes with --tasks"),
        (("eval", "gsa-tiny", "--text", "a.txt", "--json", "--markdown"), "json and markdown exclude each other"),
        (("eval", "gsa-tiny", "--text", ALICE, "--last", "3"), "--last and --samples go with --lengths"),
        (("probe", "copy", "gsa-tiny", "--lengths", "1"), "probe copy: lengths must be whole numbers from 2 to 65536"),
        (("probe", "copy", "gsa-tiny", "--samples", "0"), "probe copy: samples must be at least 1, got 0"),
        (("probe", "copy", "gsa-tiny", "--seed", "-1"), "probe copy: seed must be at least 0, got -1"),
        (("probe", "copy", "gsa-tiny", "--batch-size", "0"), "probe copy: batch_size must be at least 1, got 0"),
        (
            ("probe", "needle", "gsa-tiny", "--depths", "0,101"),
            "probe needle: depths must be whole numbers from 0 to 100 with commas between, as in 0,100, got '0,101'",
        ),
        (("probe", "needle", "gsa-tiny", "--filler", "nowhere.txt"), "nowhere.txt cannot be read"),
        (("probe", "phonebook", "gsa-tiny", "--lengths", "2"), "phonebook: lengths must be whole numbers from 3 to 2"),
        (("probe", "mqar", "gsa-tiny", "--queries", "0"), "probe mqar: queries must be at least 1, got 0"),
        (("probe", "mqar", "gsa-tiny", "--plot", "nowhere/a.png"), "'nowhere/a.png' cannot be written"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture, args: tuple[str, ...], message: str) -> None:
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert message in err
