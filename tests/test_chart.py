"""Charts in the terminal and as files."""

from pathlib import Path

import pytest

from gsa.chart import PALE, Bar, bars, check_picture, draw_bars, heat_map, picture, save_heat_map, save_lines
from gsa.errors import GSAError


def test_charts(tmp_path: Path) -> None:
    series = {"slots": {512: 1.0, 1024: 1.0}, "softmax": {512: 1.0, 1024: 4.0}}
    lines = bars(series, "T", "us", width=8).splitlines()
    assert lines[1].split() == ["512", "slots", "██", "1"]
    assert lines[4].split() == ["softmax", "████████", "4"]
    assert bars({"none": {1: 0.0}}, "T", "us").splitlines()[1].split() == ["1", "none", "0"]
    save_lines(series, tmp_path / "new" / "chart.png", "T", "us", "title")
    assert (tmp_path / "new" / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_heat_maps(tmp_path: Path) -> None:
    cells = {(512, 0): 1.0, (512, 100): 0.5, (1024, 100): 0.0}
    head, first, last = heat_map(cells, "length", "depth").splitlines()
    assert head.split() == ["depth", "\\", "length", "512", "1024"]
    assert first.split() == ["0", "████100%"]
    assert last.split() == ["100", "▒▒▒▒", "50%", "0%"]
    save_heat_map(cells, tmp_path / "map.png", "length", "depth", "title")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_bars_side_by_side(tmp_path: Path) -> None:
    series = {"a$": [Bar(0.5, 0.1), None], f"{PALE}b": [Bar(0.25), Bar(1.0)]}
    with picture(tmp_path / "bars.png") as axes:
        draw_bars(axes, ["first", "second"], series)
        heights = [bar.get_height() for bar in axes.patches]
        labels = axes.get_legend_handles_labels()[1]
    assert heights == [50.0, 25.0, 100.0]
    assert labels == ["a\\$", "b"]


def test_pictures_are_what_their_names_say(tmp_path: Path) -> None:
    for name, begin in (("a.svg", b"<?xml"), ("b.PDF", b"%PDF"), ("c.png", b"\x89PNG")):
        check_picture(str(tmp_path / name))
        with picture(tmp_path / name) as axes:
            axes.plot([1, 2], [1, 2])
        assert (tmp_path / name).read_bytes().startswith(begin)
    for name in ("a.jpg", "chart", ".png"):
        with pytest.raises(GSAError, match=r"expected the name of a picture: \.png, \.svg, \.pdf"):
            check_picture(str(tmp_path / name))
