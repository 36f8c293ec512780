"""What the notebooks draw: figures that can be read as they are, also where a variant was out of memory."""

import re
import shutil

import pytest
from matplotlib import pyplot
from matplotlib.text import Text
from matplotlib.ticker import NullFormatter

from t1lib import params, paths
from t1lib.files import write_signed
from t1lib.kit.redraw import run_cells
from t1lib.kit.run import Run
from t1lib.kit.style import WIDTH
from t1lib.measure import manifest
from t1lib.measure.records import Records

pytest_plugins = ["smoke_run"]

VARIANTS = {  # and the column of table1 that names them
    "cce": ("head", "full", "torch", "chunked", "fused-32MiB"),
    "chunks": ("head", "full", "chunked", "chunked-vocabulary", "fused"),
    "t1m1": ("mode", "gpu", "ckpt", "slide"),
    "t1m3": ("head", "full", "chunked", "chunked-vocabulary", "fused", "torch"),
}
EXPERIMENTS = params.experiments()
WITHOUT_UNIT = {"layer", "progress within one step", "number of chunks", "tokens of a chunk", "relative error"}
WITHOUT_UNIT |= {"tokens per step", "training step", "loss (nats per token)", "difference (nats per token)"}
WITHOUT_UNIT |= {"tokens per row", "predicted / measured"}
WITHOUT_UNIT |= {"relative error of dE", "time / three matrix products", "time / the products alone"}
WITHOUT_UNIT |= {"time / without the change", "rank of the token", "mean probability", "training step"}
WITHOUT_UNIT |= {"ranks", "speed-up over one rank", "tokens per second", "relative distance from one rank"}
WITHOUT_UNIT |= {"loss (nats per token)", "distance: loss (nats per token)", "gradient norm", "distance: gradient norm"}


@pytest.fixture(scope="module")
def drawn(smoke_outputs, tmp_path_factory):
    """Experiment → its figures by name, drawn from its smoke run and laid out."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("T1_ROOT", str(smoke_outputs))
        patch.setattr(Run, "figure", lambda run, name, figure: found[run.experiment].setdefault(name, figure))
        for name in EXPERIMENTS:
            found[name] = {}
            run_cells("smoke", name, tmp_path_factory.mktemp(name), figures=False)
        for figure in (figure for figures in found.values() for figure in figures.values()):
            figure.canvas.draw()
        yield found
    pyplot.close("all")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_axes_say_what_they_show_and_in_which_unit(drawn, experiment):
    for axes in (axes for figure in drawn[experiment].values() for axes in figure.axes):
        assert axes.has_data()
        for axis in (axes.xaxis, axes.yaxis):
            label = axis.get_label_text()
            ticks = [tick.get_text() for tick in axis.get_ticklabels() if tick.get_visible() and tick.get_text()]
            words = any(re.match("[A-Za-z]", tick) for tick in ticks)
            assert label or words or not ticks, "an axis of numbers without a label"
            if label and not words and label not in WITHOUT_UNIT:
                assert re.search(r"\((µs|ms|GiB|MiB)\)$", label), label


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_legend_names_nothing_twice(drawn, experiment):
    for figure in drawn[experiment].values():
        for legend in filter(None, [*figure.legends, *(axes.get_legend() for axes in figure.axes)]):
            labels = [text.get_text() for text in legend.get_texts()]
            assert labels and len(set(labels)) == len(labels), labels


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_all_text_lies_within_the_figure(drawn, experiment):
    for figure in drawn[experiment].values():
        assert figure.get_figwidth() == WIDTH
        renderer, page = figure.canvas.get_renderer(), figure.bbox
        hidden = {id(t) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for t in _unused(axis)}
        for text in figure.findobj(Text):
            if text.get_visible() and text.get_text() and id(text) not in hidden:
                box = text.get_window_extent(renderer)
                inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= page.x1 + 1 and box.y1 <= page.y1 + 1
                assert inside, (text.get_text(), box.extents.round().tolist(), page.extents.tolist())


def _unused(axis):
    """Tick labels beyond the axis limits: matplotlib keeps but does not draw them; only the drawn ones are checked."""
    used = {id(label) for tick in axis._update_ticks() for label in (tick.label1, tick.label2)}
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    labels = [label for tick in ticks for label in (tick.label1, tick.label2)]
    off = isinstance(axis.get_major_formatter(), NullFormatter)
    return [label for label in labels if off or id(label) not in used]


def out_of_memory(folder, variants):
    """The run as it would be if the variants had run out of memory before their first step."""
    frame, records = Records.load(folder / "samples.csv").frame(), Records()
    records.extend(frame[~frame["variant"].isin(variants)].to_dict("records"))
    for phase in sorted(set(frame[frame["metric"] == "status"]["phase"])):
        for variant in variants:
            records.status(variant, "oom", phase)
    records.save(folder / "samples.csv")
    content = manifest.read(folder)
    content["files"]["samples.csv"] = manifest._entry(folder / "samples.csv")
    write_signed(folder / manifest.NAME, content)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # of empty legends, of means of nothing
@pytest.mark.parametrize("several", [1, 9])
@pytest.mark.parametrize("experiment", VARIANTS)
def test_a_variant_out_of_memory_is_a_row_and_no_traceback(smoke_outputs, tmp_path, monkeypatch, experiment, several):
    root = tmp_path / "kit"
    for name in ("notebooks", "params", f"outputs/smoke/{experiment}"):
        shutil.copytree(smoke_outputs / name, root / name)
    monkeypatch.setenv("T1_ROOT", str(root))
    column, *variants = VARIANTS[experiment]
    gone = variants[:several]
    out_of_memory(paths.outputs("smoke", experiment), gone)
    tables = {}
    make = Run.table
    monkeypatch.setattr(Run, "table", lambda run, name, *rest, **more: tables.setdefault(
        name, make(run, name, *rest, **more)))  # fmt: skip
    run_cells("smoke", experiment, tmp_path / "drawn")
    first = tables["table1"].set_index(column)
    assert {name for name, state in first["status"].items() if state == "oom"} == set(gone)
