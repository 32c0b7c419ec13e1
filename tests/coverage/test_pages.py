"""What a page of results says beside its rows is still there, and still right, when rows are added."""

from __future__ import annotations

import inductor


def test_notes_stay_and_a_few_bytes_above_are_above(tmp_path):
    row = ["nn.Linear", "1,000,008", "1,000,000", "1,000,008", "1.000", "+0.00%", "1e-7", "", ""]
    below = ["nn.ReLU", "1,000,000", "1,000,008", "1,000,000", "1.000", "+0.00%", "1e-7", "", ""]
    tables = {"hf": {}, "optimizers": {}, "modules": {cells[0]: cells for cells in (row, below)}}
    path = tmp_path / "page.md"
    path.write_text(inductor.page(tables, {"modules": ["- Note: by hand."]}))
    assert "above it: nn.Linear (1.000)." in path.read_text()
    again = inductor.kept(path)
    assert again[0]["modules"] == tables["modules"] and inductor.page(*again) == path.read_text()
    assert path.read_text().count("- Note: by hand.") == 1
