"""analyze.ipynb as it is committed: executed, short cells, every verdict shown, no machine in it.

That each cell runs is checked by executing it on toy models: `jupyter execute analyze.ipynb`.
"""

import csv
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = json.loads((ROOT / "analyze.ipynb").read_text(encoding="utf-8"))
CODE = [c for c in NOTEBOOK["cells"] if c["cell_type"] == "code"]
source = lambda cell: "".join(cell["source"])


def outputs(cell):
    """All text that a cell has printed or shown."""
    parts = []
    for out in cell["outputs"]:
        parts += [out.get("text", "")] + [v for k, v in out.get("data", {}).items() if "text" in k]
    return "\n".join("".join(p) for p in parts)


def test_it_is_committed_executed_from_top_to_bottom():
    assert [c["execution_count"] for c in CODE] == [*range(1, len(CODE) + 1)]
    assert not [o for c in CODE for o in c["outputs"] if o["output_type"] == "error"]
    assert outputs(CODE[0]).startswith("full mode")


@pytest.mark.parametrize("i", range(len(CODE)))
def test_a_cell_is_short(i):
    lines = [line for line in source(CODE[i]).splitlines() if line.strip()]
    assert len(lines) <= 15
    assert all(len(line) <= 130 for line in lines)


def test_every_question_that_has_a_cell_has_a_verdict():
    """At least 24 of the 33, each with what was found, the word, and what would settle it."""
    asked = re.findall(r'verdict\(\s*"(R\d+)"', "\n".join(map(source, CODE)))
    assert len(set(asked)) >= 24 and len(asked) == len(set(asked))
    shown = "\n".join(map(outputs, CODE))
    for question in asked:
        words = "(holds|does not hold here|too small to tell)"
        assert re.search(rf"\*\*{question}\. [^*]*: {words}\.", shown), question
    assert shown.count("What would settle it") >= len(asked)


def test_the_verdicts_are_those_of_the_readme():
    with open(ROOT / "data" / "results" / "verdicts.csv", encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("<!-- verdicts -->")[1].split("<!-- end of verdicts -->")[0]
    shown = re.findall(r"^\| (?:\[)?(R\d+|GPAS)\b.*\| \*\*(.+?)\*\* \|", table, re.M)
    assert shown == [(r["question"], r["verdict"]) for r in rows]


def test_the_rest_of_the_questions_are_listed():
    text = "\n".join("".join(c["source"]) for c in NOTEBOOK["cells"])
    for number in range(1, 34):
        assert re.search(rf"\bR{number}\b", text), number


def test_no_figure_without_units_on_its_axes():
    """Every cell that draws names what it draws."""
    for cell in CODE:
        if "subplots(" in source(cell):
            assert re.search(r"label|by_depth|arms\(|heat\(", source(cell)), source(cell)[:60]


def test_it_tells_nothing_of_the_machine():
    text = json.dumps(NOTEBOOK)
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)


def test_what_the_figures_rest_on_is_small():
    results = ROOT / "data" / "results"
    assert sum(p.stat().st_size for p in results.rglob("*") if p.suffix == ".csv") < 5e6
