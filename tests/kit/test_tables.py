"""Tables fit the page of a plain article."""

import re
import shutil
import subprocess

import pytest

from t1lib.kit.tables import make_table, to_latex

WORDS = "a long sentence about what was measured, where and why, which no line of a table can hold"


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs LaTeX")
def test_a_wide_table_fits_plain_article(tmp_path):
    wide = [{"what": WORDS, "head": "chunked-vocabulary"} | {f"column {i} (ms)": 12345.678 * i for i in range(12)}] * 3
    tables = {"wide": (wide, 2), "few": ([{"asked": WORDS, "answer": WORDS}], 2), "narrow": ([{"share": 0.5}], 1)}
    for name, (rows, texts) in tables.items():
        (tmp_path / f"{name}.tex").write_text(to_latex(make_table(rows), texts))
    shown = r"\noindent\setbox0\hbox{\input{%s}}\typeout{WIDTH \the\wd0}\copy0"
    body = "\n\n".join(shown % name for name in tables)
    packages = r"\usepackage{array,booktabs,graphicx}"
    (tmp_path / "paper.tex").write_text(rf"\documentclass{{article}}{packages}\begin{{document}}{body}\end{{document}}")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Overfull" not in done.stdout, done.stdout
    wide, few, narrow = (float(found) for found in re.findall(r"WIDTH ([\d.]+)pt", done.stdout))
    assert wide == pytest.approx(345, abs=0.1) and few <= 345.1 and narrow < 100
