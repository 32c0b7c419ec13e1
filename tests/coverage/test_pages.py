"""What a page of results says beside its rows is still there, and still right, when rows are added."""

from __future__ import annotations

import check
import inductor
import zoo_page


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


def test_rows_of_the_zoo_are_read_back_and_tried_again():
    right = {"dtype": "float64", "difference": 1e-15, "tolerance": 1e-9, "step_graphs": 1, "predicted": 1000, "measured": 1000}
    found = zoo_page.Found()
    found.add("CTC", check.Row("a", peak=9, eager_peak=10, **right), "kept")
    found.add("CTC", check.Row("b", error="eager: TypeError: x"), "-")
    found.add("CTC", check.Row("c", reasons=["line 3 `a | b`"], warnings=1, peak=8, eager_peak=8, **right), "-")
    again = zoo_page.read(zoo_page.write(found, "Header."))
    assert again == found and list(again.left_out) == ["b"]
    page = zoo_page.write(again, "Header.")
    assert "2 of 2 right; 1 captured whole" in page and "Left out: 1" in page and "1 kept" in page
    again.add("CTC", check.Row("b", peak=11, eager_peak=10, **(right | {"difference": 1.0})), "-")
    page = zoo_page.write(again, "Header.")
    assert "2 of 3 right" in page and "Not right: b" in page and "above eager's: b" in page and "Left out: 0" in page
