"""Whole distillations: what is trained and what is not, a stop and the way back, mistakes."""

from __future__ import annotations

import json
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gsa.convert import load
from gsa.convert.verify import verify_folder
from gsa.data.prepare import prepare
from gsa.distill import DistillSettings, distill, stage
from gsa.errors import GSAError
from gsa.models.checkpoint import load_model, load_weights
from tests.cli.running import run
from tests.convert.families import saved
from tests.distill.small import material, settings, weights

SLOW = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("to", ["hybrid", "gsa", SLOW("gla"), SLOW("retnet"), SLOW("supra")])
def test_students_come_closer_to_their_teacher(tmp_path: Path, to: str) -> None:
    done = distill(settings(material(tmp_path, to), max_tokens=40 * 128))
    assert done.signal is None
    assert list(done.report) == ["before", "align", "distil"]
    before, after = (done.report[when][-1]["kl"] for when in ("before", "distil"))
    assert after < before
    assert torch.isfinite(load_model(tmp_path / "run" / "model")(torch.arange(50)[None]).logits).all()


def test_new_parts_alone_are_trained_if_asked_for(tmp_path: Path) -> None:
    """All else is the student's to the bit; and the record and the card tell."""
    distill(settings(material(tmp_path), train="new"))
    before, after = load_weights(tmp_path / "student"), weights(tmp_path)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    record = json.loads((tmp_path / "run" / "model" / "convert.json").read_text())
    assert changed
    assert all(".slot_" in name for name in changed)
    assert changed <= set(record["distilled"]["trained"])
    assert record["distilled"]["tokens"] == {"align": 768, "distil": 768}
    assert "Distilled from its teacher" in (tmp_path / "run" / "model" / "README.md").read_text()


def test_a_model_that_is_distilled_again_tells_of_both(tmp_path: Path) -> None:
    """What either has trained is not expected to be the source's."""
    few = {"max_tokens": 2 * 128}
    distill(settings(material(tmp_path), "one", **few))
    model = str(tmp_path / "one" / "model")
    for out in ("two", "three"):
        distill(settings(tmp_path, out, **few, train="new", student=model))
        model = str(tmp_path / out / "model")
    files = [tmp_path / out / "model" / "convert.json" for out in ("one", "two", "three")]
    one, two, three = (json.loads(file.read_text())["distilled"] for file in files)
    assert all(check.passed for check in verify_folder(tmp_path / "three" / "model"))
    assert one["trained"] == two["trained"] == three["trained"]
    assert [found["settings"]["train"] for found in (*three["earlier"], three)] == ["attention", "new", "new"]
    assert two["earlier"] == [one]
    card = (tmp_path / "three" / "model" / "README.md").read_text()
    assert (card.count("Distilled from its teacher on"), card.count("Distilled again from its teacher on")) == (1, 2)


def test_a_damaged_record_is_told(tmp_path: Path) -> None:
    material(tmp_path)
    path = tmp_path / "student" / "convert.json"
    record = json.loads(path.read_text())
    for damage in ([], {}, {"trained": [1]}, {"trained": [], "earlier": None}):
        path.write_text(json.dumps({**record, "distilled": damage}))
        with pytest.raises(GSAError, match="distilled must be an object with 'trained', a list of names of tensors"):
            distill(settings(tmp_path))


def test_slots_that_are_closed_for_good_stay_closed(tmp_path: Path) -> None:
    """So a window alone can be trained like a hybrid (docs/results/window_student.py)."""
    material(tmp_path)
    file = tmp_path / "student" / "model.safetensors"
    tensors = load_weights(tmp_path / "student")
    closed = {name: tensor.fill_(-1e4) for name, tensor in tensors.items() if name.endswith(".slot_bias")}
    save_file(tensors, file, metadata={"format": "pt"})
    distill(settings(tmp_path))
    after = weights(tmp_path)
    assert closed
    assert all(torch.equal(after[name], closed[name]) for name in closed)
    assert all(tensor.isfinite().all() for name, tensor in after.items() if name not in closed)
    assert any(not torch.equal(after[name], tensors[name]) for name in after if "q_proj" in name)


def test_all_can_be_trained(tmp_path: Path) -> None:
    distill(settings(material(tmp_path), train="all"))
    before, after = load_weights(tmp_path / "student"), weights(tmp_path)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert not {name for name in same if ".mlp" in name or "embeddings" in name or ".norm" in name}


def test_updates_of_low_rank(tmp_path: Path) -> None:
    """What the teacher has too differs by a matrix of that rank; the folder is an ordinary model."""
    distill(settings(material(tmp_path), rank=2))
    before, after = load_weights(tmp_path / "student"), weights(tmp_path)
    assert before.keys() == after.keys()
    for name in before:
        if ".mixer." in name and "_proj" in name:
            values = torch.linalg.svdvals((after[name] - before[name]).double())
            assert values[1] > 0
            assert values[2] < 1e-3 * values[0]


@pytest.mark.parametrize(("rank", "place"), [(None, 9), (2, 3), SLOW(None, 3), SLOW(2, 9)])
def test_a_run_that_was_stopped_goes_on_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int | None, place: int
) -> None:
    """In either stage, after Ctrl-C."""
    material(tmp_path)
    distill(settings(tmp_path, "whole", rank=rank))

    steps = 0
    step = stage.Stage._step

    def counted(self: stage.Stage) -> Any:
        nonlocal steps
        steps += 1
        if steps == place:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(stage.Stage, "_step", counted)
    stopped = distill(settings(tmp_path, rank=rank))
    assert stopped.signal == signal.SIGINT
    assert stopped.model is None
    done = distill(settings(tmp_path, rank=rank))
    assert steps == 12
    assert done.model is not None
    expected = weights(tmp_path, "whole")
    for name, x in weights(tmp_path).items():
        assert torch.equal(x, expected[name]), name


def test_time_that_does_not_do_makes_fewer_steps(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Told and recorded; with enough of it, all are taken."""
    material(tmp_path)
    more = {"data": tmp_path / "train", "length": 64, "max-tokens": 100_000, "max-hours": 1e-6, "align-share": 1}
    given = [str(word) for name, value in more.items() for word in (f"--{name}", value)]
    code, _, errors = run(capsys, "distill", tmp_path / "student", tmp_path / "run", *given)
    assert code == 0
    assert f"{stage.MEASURED} steps in the time there is, instead of 782" in errors
    record = json.loads((tmp_path / "run" / "model" / "convert.json").read_text())
    assert record["distilled"]["tokens"] == {"align": stage.MEASURED * 128}


def test_the_teachers_likeliest_tokens_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another student finds them on disk; a file that is damaged is told."""
    material(tmp_path)
    distill(settings(tmp_path, align_share=0.0))
    files = sorted((tmp_path / "train.logits").rglob("row-*.safetensors"))
    assert files
    monkeypatch.setattr("gsa.distill.likeliest.TeacherRows._computed", None)
    distill(settings(tmp_path, "other", align_share=0.0, train="new"))
    files[0].write_bytes(files[0].read_bytes()[:100])
    with pytest.raises(GSAError, match=r"row-.*not a whole safetensors file"):
        distill(settings(tmp_path, "third", align_share=0.0))


def test_micro_batches_learn_the_same(tmp_path: Path) -> None:
    """To rounding; and the teacher's tokens lie where they are asked for."""
    material(tmp_path)
    place = tmp_path / "elsewhere"
    more = {"align_share": 0.0, "batch_size": 4, "max_tokens": 4 * 64 * 3, "logits": str(place)}
    distill(settings(tmp_path, "whole", **more))
    distill(settings(tmp_path, "parts", **more, micro_batch_size=1))
    expected = weights(tmp_path, "whole")
    for name, x in weights(tmp_path, "parts").items():
        torch.testing.assert_close(x, expected[name], rtol=1e-3, atol=1e-4)
    assert list(place.rglob("row-*.safetensors"))
    assert not (tmp_path / "train.logits").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": None}, "data is missing"),
        ({"data": "nowhere"}, "there is no such folder"),
        ({"student": "nowhere"}, "there is no such folder; `gsa convert` writes one"),
        ({"rank": 2, "train": "new"}, "rank does nothing with train new"),
        ({"rank": 100}, "rank 100 is not low"),
        ({"windows": "0,4"}, "whole numbers from 1"),
        ({"windows": "1;2"}, "whole numbers from 1 with commas between .*, got '1;2'"),
        ({"windows": "1,9"}, "windows: 9 is more than the student's own window, 8"),
        ({"batch_size": 3, "micro_batch_size": 2}, "multiple of micro_batch_size"),
        ({"length": 2**20}, "fewer than a row of 1048576"),
        ({"teacher": "nowhere"}, "'nowhere' was not found"),
        ({"train": "some"}, "train must be one of new, attention, all"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Before there is a folder, which the corrected command would find to be of another run."""
    material(tmp_path)
    with pytest.raises(GSAError, match=message):
        distill(settings(tmp_path, **changes))
    assert not (tmp_path / "run").exists()


def test_students_that_cannot_be_trained_so_are_told(tmp_path: Path) -> None:
    """Before there is a folder, too."""
    material(tmp_path, "attention")
    with pytest.raises(GSAError, match="there is nothing to train"):
        distill(settings(tmp_path, train="new"))
    with pytest.raises(GSAError, match="windows are for hybrids; this student has none"):
        distill(settings(tmp_path, windows="4"))
    assert not (tmp_path / "run").exists()


def test_settings_that_would_do_nothing_are_refused_by_name(tmp_path: Path) -> None:
    """Those with a value of their own; defaults are silent, also when they are written out."""
    values: dict[str, Any] = {"windows": "1,2", "rank": 2, "logits": "logits", "micro_batch_size": 1}
    values |= dict.fromkeys(("align_lr", "align_lr_attention", "lr", "lr_attention", "lr_rest"), 1e-2)
    settings(tmp_path, train="all", **values)
    idle = {
        ("align_share", 0): ("windows", "align_lr", "align_lr_attention"),
        ("align_share", 1): ("lr", "lr_attention", "lr_rest", "logits", "micro_batch_size"),
        ("train", "new"): ("rank", "align_lr_attention", "lr_attention", "lr_rest"),
        ("train", "attention"): ("lr_rest",),
    }
    for (name, value), others in idle.items():
        settings(tmp_path, **{name: value}, **{other: getattr(DistillSettings, other) for other in values})
        for other in others:
            with pytest.raises(GSAError, match=f"^distill: {other} does nothing with {name} {value}, which leaves"):
                settings(tmp_path, **{name: value}, **{other: values[other]})
    with pytest.raises(GSAError, match="train all is attention with align_share 1"):
        settings(tmp_path, train="all", align_share=1.0)


def test_windows_are_read_with_the_settings(tmp_path: Path) -> None:
    with pytest.raises(GSAError, match="whole numbers from 1"):
        settings(tmp_path, windows="1;2")


def test_what_would_stop_the_second_stage_is_told_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place for the teacher's tokens that is none, or has no room for them."""
    material(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(GSAError, match=r"logits .*file.* cannot be written"):
        distill(settings(tmp_path, logits=str(tmp_path / "file")))
    monkeypatch.setattr("gsa.distill.likeliest.free_bytes", lambda place: 1000)
    with pytest.raises(GSAError, match=r"logits of 768 tokens take .*, the disk of .* has 1000 bytes free"):
        distill(settings(tmp_path))
    assert not (tmp_path / "run").exists()


def test_texts_that_are_learned_from_are_no_evaluation(tmp_path: Path) -> None:
    """By what they hold, under whatever name."""
    material(tmp_path)
    shutil.copytree(tmp_path / "train", tmp_path / "copy")
    with pytest.raises(GSAError, match=r"eval_data .*copy has the tokens of data .*train: expected texts that are not"):
        distill(settings(tmp_path, eval_data=str(tmp_path / "copy")))
    assert not (tmp_path / "run").exists()


def test_a_table_is_of_one_set_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other texts for the second half of a run, or for one that has ended, all of it is measured anew."""
    material(tmp_path)
    few = {"max_tokens": 4 * 128, "train": "new"}
    expected = {rows: distill(settings(tmp_path, f"rows{rows}", **few, eval_rows=rows)).report for rows in (2, 3)}
    assert expected[2]["before"] != expected[3]["before"]

    step = stage.Stage._step

    def stopping(self: stage.Stage) -> Any:
        if self.name == "distil":
            signal.raise_signal(signal.SIGINT)
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(stage.Stage, "_step", stopping)
        stopped = distill(settings(tmp_path, **few))
    assert stopped.report == {when: expected[2][when] for when in ("before", "align")}
    for rows in (3, 2):
        done = distill(settings(tmp_path, **few, eval_rows=rows))
        assert done.report == expected[rows]
        record = json.loads((tmp_path / "run" / "model" / "convert.json").read_text())
        assert record["distilled"]["by_position"] == expected[rows]
    (tmp_path / "other.txt").write_text("It was the best of times, it was the worst of times. " * 20)
    prepare([str(tmp_path / "other.txt")], "bytes", tmp_path / "other", processes=1, progress=False)
    found = distill(settings(tmp_path, **few, eval_data=str(tmp_path / "other"))).report
    assert list(found) == list(expected[2])
    assert all(found[when][0]["teacher_ce"] != expected[2][when][0]["teacher_ce"] for when in found)


def test_another_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    material(tmp_path)
    distill(settings(tmp_path))
    with pytest.raises(GSAError, match=r"other settings \(seed\)"):
        distill(settings(tmp_path, seed=1))
    again = distill(settings(tmp_path))  # nothing is left to do
    assert again.model is not None


def test_a_source_that_has_moved_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    material(tmp_path)
    (tmp_path / "source").rename(tmp_path / "moved")
    with pytest.raises(GSAError, match=r"source, which the student was converted from, .*name it with --teacher"):
        distill(settings(tmp_path))
    distill(settings(tmp_path, teacher=str(tmp_path / "moved")))
    record = json.loads((tmp_path / "student" / "convert.json").read_text())
    (tmp_path / "student" / "convert.json").write_text(json.dumps({**record, "source": "made/source"}))

    def not_on_the_hub(source: str) -> None:
        raise GSAError(f"{source} was not found")

    monkeypatch.setattr("gsa.distill.prepare.load_teacher", not_on_the_hub)
    with pytest.raises(GSAError, match="made/source was not found; if it is a folder or file that has moved, name it"):
        distill(settings(tmp_path, "other"))


def test_another_teacher_is_refused(tmp_path: Path) -> None:
    """Of the same sizes: by its config, or by its weights."""
    material(tmp_path)
    others = {
        "bias": (saved(tmp_path / "bias", "qwen2", num_hidden_layers=2), "has qkv_bias True, the student's False"),
        "norm": (saved(tmp_path / "norm", num_hidden_layers=2, rms_norm_eps=1e-4), "has rms_norm_eps 0.0001, the"),
        "weights": (saved(tmp_path / "weights", num_hidden_layers=2), "model.norm.weight differs from the student's"),
    }
    file = tmp_path / "weights" / "model.safetensors"
    tensors = load_weights(tmp_path / "weights")
    tensors["model.norm.weight"][3] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    for place, message in others.values():
        with pytest.raises(GSAError, match=f"{message}.*: it is not what the student was converted from"):
            distill(settings(tmp_path, teacher=str(place)))
    assert not (tmp_path / "run").exists()


def test_a_teacher_loads_as_it_is(tmp_path: Path) -> None:
    material(tmp_path, "attention")
    ids = torch.arange(30)[None]
    assert torch.equal(load.load_teacher(tmp_path / "source")(ids).logits, load_model(tmp_path / "student")(ids).logits)
