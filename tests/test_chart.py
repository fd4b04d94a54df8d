"""Charts in the terminal and as files."""

from pathlib import Path

from gsa.chart import bars, save_lines


def test_charts(tmp_path: Path) -> None:
    series = {"slots": {512: 1.0, 1024: 1.0}, "softmax": {512: 1.0, 1024: 4.0}}
    lines = bars(series, "T", "us", width=8).splitlines()
    assert lines[1].split() == ["512", "slots", "██", "1"]
    assert lines[4].split() == ["softmax", "████████", "4"]
    save_lines(series, tmp_path / "new" / "chart.png", "T", "us", "title")
    assert (tmp_path / "new" / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "new").iterdir())) == 1
