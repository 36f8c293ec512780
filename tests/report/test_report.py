"""Figures, tables and numbers of all experiments, from the records of a smoke run alone."""

import json
import re
import warnings

import matplotlib
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.text import Text
from matplotlib.ticker import NullFormatter

from t1lib.kit.style import WIDTH, style
from t1lib.measure.peers import PEERS, whether_available
from t1lib.measure.records import Numbers, Records
from t1lib.report import _MODULES, figures_of, numbers_of, tables_of

FIGURES = {name: figures_of(name) for name in _MODULES}
TABLES = {name: tables_of(name) for name in _MODULES}
NUMBERS = {name: numbers_of(name) for name in _MODULES}

pytest_plugins = ["smoke_run"]
pytestmark = pytest.mark.filterwarnings("error")

VARIANTS = {
    "t1m1": ("gpu", "ckpt", "slide"),
}
# Of table1: the column that names the variant; and the phase and metric of its time in the numbers.
SUMMARY = {
    "t1m1": ("mode", "own", "wall_ms"),
}
ALL_FIGURES = [(experiment, name) for experiment in FIGURES for name in FIGURES[experiment]]
ALL_TABLES = [(experiment, name) for experiment in TABLES for name in TABLES[experiment]]
OUT_OF_MEMORY = [(experiment, variant) for experiment in VARIANTS for variant in VARIANTS[experiment]]
WITHOUT_UNIT = {"layer", "progress within one step", "tokens a step", "number of chunks", "tokens of a chunk"}
WITHOUT_UNIT |= {"relative error", "relative error of dE", "time / three matrix products", "time / floor"}
WITHOUT_UNIT |= {"time / without the change", "rank of the token", "mean probability", "training step"}
WITHOUT_UNIT |= {"loss (nats a token)", "distance: loss (nats a token)", "gradient norm", "distance: gradient norm"}
WITHOUT_UNIT |= {"difference (nats a token)", "tokens a row", "ranks", "speed-up over one rank", "tokens a second"}
WITHOUT_UNIT |= {"predicted / measured"}


@pytest.fixture(scope="module")
def samples(smoke_outputs):
    """Experiment → path of its samples.csv."""
    return {name: smoke_outputs / "outputs" / "smoke" / name / "samples.csv" for name in FIGURES}


@pytest.fixture
def frames(samples):
    return {name: Records.load(path).frame() for name, path in samples.items()}


@pytest.fixture
def draw(frames):
    """Draw a figure as a run does, and lay it out."""

    def drawn(experiment, name, frame=None):
        with style():
            figure = FIGURES[experiment][name](frames[experiment] if frame is None else frame)
            figure.canvas.draw()
        return figure

    yield drawn
    plt.close("all")


def shown_ticks(axis):
    return [label for label in axis.get_ticklabels() if label.get_visible() and label.get_text()]


@pytest.mark.parametrize(("experiment", "name"), ALL_FIGURES)
def test_axes_say_what_they_show_and_in_which_unit(draw, experiment, name):
    for axes in draw(experiment, name).axes:
        assert axes.has_data()
        for axis in (axes.xaxis, axes.yaxis):
            label = axis.get_label_text()
            ticks = shown_ticks(axis)
            words = any(re.match("[A-Za-z]", tick.get_text()) for tick in ticks)
            assert label or words or not ticks, "an axis of numbers without a label"
            if label and not words and label not in WITHOUT_UNIT:
                assert re.search(r"\((µs|ms|GiB|MiB)\)$", label), label


@pytest.mark.parametrize(("experiment", "name"), ALL_FIGURES)
def test_a_legend_names_nothing_twice(draw, experiment, name):
    figure = draw(experiment, name)
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    for legend in filter(None, legends):
        labels = [text.get_text() for text in legend.get_texts()]
        assert labels and len(set(labels)) == len(labels), labels


@pytest.mark.parametrize(("experiment", "name"), ALL_FIGURES)
def test_all_text_lies_within_the_figure(draw, experiment, name):
    figure = draw(experiment, name)
    assert figure.get_figwidth() == WIDTH
    renderer, page = figure.canvas.get_renderer(), figure.bbox
    outside = []
    hidden = {id(t) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for t in _unused(axis)}
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text() and id(text) not in hidden:
            box = text.get_window_extent(renderer)
            if box.x0 < -1 or box.y0 < -1 or box.x1 > page.x1 + 1 or box.y1 > page.y1 + 1:
                outside.append((text.get_text(), box.extents.round().tolist(), page.extents.tolist()))
    assert not outside


def _unused(axis):
    """Tick labels beyond the axis limits: matplotlib keeps but does not draw them; only the drawn ones are checked."""
    drawn = {id(label) for tick in axis._update_ticks() for label in (tick.label1, tick.label2)}
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    labels = [label for tick in ticks for label in (tick.label1, tick.label2)]
    off = isinstance(axis.get_major_formatter(), NullFormatter)
    return [label for label in labels if off or id(label) not in drawn]


@pytest.mark.parametrize("experiment", FIGURES)
def test_figures_depend_on_the_records_alone(samples, frames, tmp_path, experiment):
    records = Records()
    records.extend(frames[experiment].to_dict("records"))
    records.save(tmp_path / "samples.csv")
    assert (tmp_path / "samples.csv").read_bytes() == samples[experiment].read_bytes()
    again = Records.load(tmp_path / "samples.csv").frame()
    for name, figure in FIGURES[experiment].items():
        pictures = []
        for which, frame in enumerate((frames[experiment], again)):
            with style():
                drawn = figure(frame)
                drawn.savefig(tmp_path / f"{which}.png", dpi=60)
            plt.close(drawn)
            pictures.append((tmp_path / f"{which}.png").read_bytes())
        assert pictures[0] == pictures[1], name


@pytest.mark.parametrize(("experiment", "name"), ALL_TABLES)
def test_tables_have_rows_and_their_latex_has_as_many(frames, experiment, name):
    table = TABLES[experiment][name](frames[experiment])
    rows, columns = table.frame.shape
    assert rows > 0 and columns > 1
    body = table.latex.split("\\midrule\n")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert len(body) == rows
    for line in body:
        assert len(re.findall(r"(?<!\\)&", line)) == columns - 1
    assert "nan" not in table.latex.lower().replace("dominant", "")


def test_numbers_are_those_of_the_run_and_none_is_missing(frames, samples):
    unavailable = tuple(f".{method}." for method in ("torch", *PEERS) if whether_available(method))
    for experiment, frame in frames.items():
        numbers = Numbers()
        NUMBERS[experiment](frame, numbers)
        filed = json.loads((samples[experiment].parent / "numbers.json").read_text())
        assert {key: filed[key]["text"] for key in numbers} == {key: entry["text"] for key, entry in numbers.items()}
        missing = [key for key, entry in numbers.items() if entry["value"] is None]
        # A CPU has no caching allocator, which alone reserves memory, and smoke compiles no layers.
        explained = ("reserved", "memory_over", ".compiled.", *unavailable)
        unexplained = [k for k in missing if not any(part in k for part in explained)]
        assert len(numbers) > 50 and not unexplained


def out_of_memory(frame, variants):
    """The records as they would be if the variants had run out of memory before their first step."""
    records = Records()
    kept = frame[~frame["variant"].isin(variants)]
    records.extend(kept.to_dict("records"))
    for phase in sorted(set(frame[frame["metric"] == "status"]["phase"])):
        for variant in variants:
            records.status(variant, "oom", phase)
    return records.frame()


@pytest.mark.parametrize(("experiment", "variant"), [*OUT_OF_MEMORY, *((name, "all") for name in VARIANTS)])
def test_a_variant_out_of_memory_is_a_row_and_no_traceback(draw, frames, experiment, variant):
    gone = VARIANTS[experiment] if variant == "all" else (variant,)
    frame = out_of_memory(frames[experiment], gone)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if variant == "all" else "error")  # an empty legend causes a warning
        for name in FIGURES[experiment]:
            draw(experiment, name, frame)
            plt.close("all")
        tables = {name: make(frame).frame for name, make in TABLES[experiment].items()}
        numbers = Numbers()
        NUMBERS[experiment](frame, numbers)
    column, phase, time = SUMMARY[experiment]
    first = tables["table1"].set_index(column)
    assert {name for name, state in first["status"].items() if state == "oom"} == set(gone)
    for name in gone:
        assert numbers[f"{experiment}.{phase}.{name}.{time}"]["value"] is None
        assert numbers[f"{experiment}.{phase}.{name}.n"]["value"] == 0
