"""T1M1's tables and numbers, from its records alone."""

import math

import pandas as pd

from t1lib.kit import published
from t1lib.kit.select import layer_ms, median, pick, present
from t1lib.kit.tables import MISSING, Table, make_table, mean_std, median_iqr
from t1lib.measure.memory import GIB
from t1lib.measure.records import PLACES, Numbers, statuses
from t1lib.report.t1m1 import ABLATION, MODES, OWN, ROUNDING, losses_apart


def table1(frame: pd.DataFrame) -> Table:
    """T1M1's Table 1: the report's own setting."""
    phase = "own"
    status = statuses(frame[frame["phase"] == phase])
    rows = []
    for mode in OWN:
        wall = pick(frame, "wall_ms", phase, mode)
        rows.append({
            "mode": mode,
            "status": status.get(mode, MISSING),
            "n": len(wall) or None,
            "wall, mean ± std (ms)": mean_std(wall),
            "median [IQR] (ms)": median_iqr(wall),
            "× link floor": _over_link(frame, phase, mode) if mode.startswith("slide") else None,
            "allocated (GiB)": median(frame, "allocated_gib", phase, mode),
            "reserved (GiB)": median(frame, "reserved_gib", phase, mode),
            "host (GiB)": median(frame, "host_gib", phase, mode),
        })  # fmt: skip
    return make_table(rows, text_columns=2)


def _over_link(frame: pd.DataFrame, phase: str, mode: str) -> float:
    return median(frame, "wall_ms", phase, mode) / median(frame, "link_ms", phase, mode)


SETTINGS = {"real": "plain", "compiled": "compiled", "clipped": "clipped", "kept": "kept"}


def table2_real(frame: pd.DataFrame) -> Table:
    """A real loss and AdamW with float32 master weights: each setting's modes compared with its first one."""
    rows = []
    for phase, label in SETTINGS.items():
        status = statuses(frame[frame["phase"] == phase])
        first = next(iter(status), None)
        for mode in status:
            wall, base = pick(frame, "wall_ms", phase, mode), median(frame, "wall_ms", phase, first)
            rows.append({
                "setting": label,
                "mode": mode,
                "status": status[mode],
                "n": len(wall) or None,
                "median [IQR] (ms)": median_iqr(wall),
                "× the setting's first": median(frame, "wall_ms", phase, mode) / base,
                "longest floor (ms)": _longest_floor(frame, phase, mode),
                "allocated (GiB)": median(frame, "allocated_gib", phase, mode),
                "reserved (GiB)": median(frame, "reserved_gib", phase, mode),
                "host (GiB)": median(frame, "host_gib", phase, mode),
            })  # fmt: skip
    return make_table(rows, text_columns=3)


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else round(value)


def _longest_floor(frame: pd.DataFrame, phase: str, variant: str) -> float:
    """The longest of the floors of link, host update and computing (ms); NaN if none was measured."""
    names = ("link_ms", "update_floor_ms", "compute_floor_ms")
    return float(pd.Series([median(frame, n, phase, variant) for n in names]).max())


def table4_capacity(frame: pd.DataFrame) -> Table:
    """Models whose state is held on the host, trained within a budget."""
    rows = []
    for name in dict.fromkeys(frame[frame["phase"] == "capacity"]["variant"]):
        loss = pick(frame, "loss", "capacity", name)
        rows.append({
            "model, budget, state": name,
            "first loss": loss.iloc[0] if len(loss) else None,
            "last loss": loss.iloc[-1] if len(loss) else None,
            "median (ms)": median(frame, "wall_ms", "capacity", name),
            "longest floor (ms)": _longest_floor(frame, "capacity", name),
            "reserved (GiB)": median(frame, "reserved_gib", "capacity", name),
            "host (GiB)": median(frame, "host_gib", "capacity", name),
            "layers resident": _whole(median(frame, "resident", "capacity", name)),
        })  # fmt: skip
    return make_table(rows, text_columns=1)


def table5_published(frame: pd.DataFrame) -> Table:
    """Published against measured, in the report's own setting."""
    rows = []
    labels = {"wall_ms": "wall (ms)", "reserved_gib": "peak reserved (GiB)", "host_gib": "peak host (GiB)"}
    for metric, label in labels.items():
        for mode in published.T1M1:
            ours, theirs = median(frame, metric, "own", mode), published.T1M1[mode][metric]
            text = format(theirs, published.digits(metric, theirs))
            rows.append({"quantity": label, "mode": mode, "published": text, "measured": ours, "ratio": ours / theirs})
    for label, metric in (("slide / gpu, wall", "wall_ms"), ("gpu / slide, reserved", "reserved_gib")):
        up, down = ("slide", "gpu") if metric == "wall_ms" else ("gpu", "slide")
        ours = median(frame, metric, "own", up) / median(frame, metric, "own", down)
        theirs = published.T1M1[up][metric] / published.T1M1[down][metric]
        rows.append({"quantity": label, "mode": "", "published": theirs, "measured": ours, "ratio": ours / theirs})
    return make_table(rows, text_columns=2)


def numbers(frame: pd.DataFrame, out: Numbers) -> None:
    """Every number that the report's prose quotes: `t1m1.<setting>.<mode>.<metric>` and what is derived from them."""
    units = {"wall_ms": "ms", "allocated_gib": "GiB", "reserved_gib": "GiB", "host_gib": "GiB", "host_setup_gib": "GiB"}
    units |= {"pinned_gib": "GiB"}
    for phase in ("own", "real"):
        for mode in OWN if phase == "own" else MODES:
            for metric, unit in units.items():
                out.set(f"t1m1.{phase}.{mode}.{metric}", median(frame, metric, phase, mode), unit)
            wall = pick(frame, "wall_ms", phase, mode)
            out.set(f"t1m1.{phase}.{mode}.wall_std_ms", float(wall.std(ddof=1)), "ms")
            out.set(f"t1m1.{phase}.{mode}.n", len(wall))
        _ratios(frame, phase, out)
    _settings(frame, out)
    out.set("t1m1.own.device_over_floor", _over_link(frame, "own", "slide-device"), "", ".2f")
    device, gpu = (median(frame, "wall_ms", "own", mode) for mode in ("slide-device", "gpu"))
    out.set("t1m1.own.device_over_gpu", device / gpu, "", ".2f")
    for mode in MODES:
        out.set(f"t1m1.own.{mode}.traced_ms", median(frame, "traced_ms", "own", mode), "ms")
    for metric in ("h2d_gb_s", "d2h_gb_s", "both_in_gb_s", "both_out_gb_s"):
        out.set(f"t1m1.link.{metric}", median(frame, metric, "own", "slide"), "GB/s")
    for name in present(frame, "wall_ms", "ablation", ABLATION):
        out.set(f"t1m1.ablation.{name}.wall_ms", median(frame, "wall_ms", "ablation", name), "ms")
        cost = median(frame, "wall_ms", "ablation", name) / median(frame, "wall_ms", "ablation", "slide")
        out.set(f"t1m1.ablation.{name}.ratio", cost, "", ".2f")
    for metric in sorted(set(frame[frame["phase"] == "expected"]["metric"])):
        counted = ".0f" if metric == "layers" else None
        out.set(f"t1m1.expected.{metric}", median(frame, metric, "expected", "model"), "", counted)
    out.set("t1m1.slide.update_sum_ms", float(layer_ms(frame, "slide", "update", "update").sum()), "ms")
    published_numbers("t1m1", published.T1M1, out)
    theirs = published.T1M1
    out.set("t1m1.published.slide_over_gpu", theirs["slide"]["wall_ms"] / theirs["gpu"]["wall_ms"], "", ".1f")
    out.set("t1m1.published.memory_saving", theirs["gpu"]["reserved_gib"] / theirs["slide"]["reserved_gib"], "", ".1f")


def published_numbers(experiment: str, values: dict[str, dict[str, float]], out: Numbers) -> None:
    """A report's published numbers, as printed: `<experiment>.published.<variant>.<metric>`, and its setting."""
    for variant, metrics in values.items():
        for metric, value in metrics.items():
            unit = "GiB" if metric.endswith("_gib") else "ms"
            out.set(f"{experiment}.published.{variant}.{metric}", value, unit, published.digits(metric, value))
    for key, value in published.SETTING.items():
        if "." not in key or key.startswith(experiment):
            out.set(f"{experiment}.published.{key.removeprefix(experiment + '.')}", value, "", "d")


def _settings(frame: pd.DataFrame, out: Numbers) -> None:
    """Slide against ckpt, gpu and fsdp where they are compared, its updates against their floor, parity, capacity."""

    def wall(phase: str, mode: str) -> float:
        return median(frame, "wall_ms", phase, mode)

    for phase, other in (("compiled", "ckpt"), ("clipped", "ckpt"), ("kept", "gpu")):
        out.set(f"t1m1.{phase}.slide_over_{other}", wall(phase, "slide") / wall(phase, other), "", ".2f")
        for mode in (other, "slide"):
            out.set(f"t1m1.{phase}.{mode}.wall_ms", wall(phase, mode), "ms")
            out.set(f"t1m1.{phase}.{mode}.reserved_gib", median(frame, "reserved_gib", phase, mode), "GiB")
    for phase, mode, name in (("compiled", "slide-narrow", "slide-narrow"), ("clipped", "slide-budget", "budget")):
        out.set(f"t1m1.{phase}.{name}_over_ckpt", wall(phase, mode) / wall(phase, "ckpt"), "", ".2f")
        out.set(f"t1m1.{phase}.{mode}.reserved_gib", median(frame, "reserved_gib", phase, mode), "GiB")
    for phase, mode in (("real", "slide"), ("compiled", "slide-narrow")):
        out.set(f"t1m1.{phase}.{mode}.host_bytes_a_parameter", _host_bytes(frame, phase, mode), "bytes", ".1f")
    for phase in ("own", "real"):
        out.set(f"t1m1.{phase}.fsdp_over_slide", wall(phase, "fsdp") / wall(phase, "slide"), "", ".2f")
        out.set(f"t1m1.{phase}.fsdp.optimizer_ms", median(frame, "optimizer_ms", phase, "fsdp"), "ms")
        held = [median(frame, "reserved_gib", phase, mode) for mode in ("fsdp", "slide")]
        out.set(f"t1m1.{phase}.fsdp_memory_over_slide", held[0] / held[1], "", ".1f")
    took, floor = (median(frame, m, "real", "slide") for m in ("update_sum_ms", "update_floor_ms"))
    out.set("t1m1.real.update_sum_ms", took, "ms")
    out.set("t1m1.real.update_rate_over_copy", floor / took, "", ".2f")
    out.set("t1m1.parity.steps", len(pick(frame, "loss", "parity", "gpu")))
    for name, variants in (("slide", ("slide",)), ("rounding", ROUNDING)):
        out.set(f"t1m1.parity.{name}_apart", float(losses_apart(frame, variants).max()), "nats")
    for name in dict.fromkeys(frame[frame["phase"] == "capacity"]["variant"]):
        key, loss = name.split()[0].replace(".", "-"), pick(frame, "loss", "capacity", name)
        out.set(f"t1m1.capacity.{key}.wall_ms", median(frame, "wall_ms", "capacity", name), "ms")
        out.set(f"t1m1.capacity.{key}.floor_ms", _longest_floor(frame, "capacity", name), "ms")
        out.set(f"t1m1.capacity.{key}.reserved_gib", median(frame, "reserved_gib", "capacity", name), "GiB")
        out.set(f"t1m1.capacity.{key}.host_gib", median(frame, "host_gib", "capacity", name), "GiB")
        out.set(f"t1m1.capacity.{key}.loss_fell", float(loss.iloc[0] - loss.iloc[-1]) if len(loss) else float("nan"))


def _host_bytes(frame: pd.DataFrame, phase: str, mode: str) -> float:
    """Bytes of host memory per parameter, beyond what ckpt's process takes."""
    held, base = (median(frame, "host_gib", phase, m) for m in (mode, "ckpt"))
    return (held - base) * GIB / median(frame, "params", "expected", "model")


def _ratios(frame: pd.DataFrame, phase: str, out: Numbers) -> None:
    def ratio(metric: str, up: str, down: str) -> float:
        return median(frame, metric, phase, up) / median(frame, metric, phase, down)

    out.set(f"t1m1.{phase}.slide_over_gpu", ratio("wall_ms", "slide", "gpu"), "", ".2f")
    out.set(f"t1m1.{phase}.slide_over_ckpt", ratio("wall_ms", "slide", "ckpt"), "", ".2f")
    out.set(f"t1m1.{phase}.ckpt_over_gpu", ratio("wall_ms", "ckpt", "gpu"), "", ".2f")
    memory = "reserved_gib" if len(pick(frame, "reserved_gib", phase, "slide")) else "allocated_gib"
    out.set(f"t1m1.{phase}.memory_saving", ratio(memory, "gpu", "slide"), "", ".1f")
    floor = median(frame, "link_ms", phase, "slide")
    out.set(f"t1m1.{phase}.link_floor_ms", floor, "ms")
    out.set(f"t1m1.{phase}.slide_over_floor", median(frame, "wall_ms", phase, "slide") / floor, "", ".2f")
    out.set(f"t1m1.{phase}.loss_difference", median(frame, "loss_difference", phase, "all"))
    out.set(f"t1m1.{phase}.tokens", median(frame, "tokens", phase, "all"), "", ".0f")


PLACE_TEXTS = {
    "device": "device",
    "host": "host",
    "streamed": "host, weights too",
    "parked": "host, weights in the backward",
}


def _place(number: float | None) -> str:
    """The text for a recorded place: records hold its index in `PLACES`."""
    return MISSING if number is None or math.isnan(number) else PLACE_TEXTS[PLACES[int(number)]]


def table3_budget(frame: pd.DataFrame) -> Table:
    """Slide under budgets of device memory: what it keeps on the device, and the memory and time of that."""
    rows = []
    for name in dict.fromkeys(frame[frame["phase"] == "budget"]["variant"]):
        found = {k: median(frame, k, "budget", name) for k in ("resident", "keep", "inputs", "outer")}
        rows.append({
            "budget": name,
            "layers resident": _whole(found["resident"]),
            "activations kept": _whole(found["keep"]),
            "inputs on": _place(found["inputs"]),
            "outer state on": _place(found["outer"]),
            "predicted (GiB)": median(frame, "predicted_gib", "budget", name),
            "allocated (GiB)": median(frame, "allocated_gib", "budget", name),
            "reserved (GiB)": median(frame, "reserved_gib", "budget", name),
            "median (ms)": median(frame, "wall_ms", "budget", name),
        })  # fmt: skip
    return make_table(rows, text_columns=2)


TABLES = {
    "table1": table1,
    "table2_real": table2_real,
    "table3_budget": table3_budget,
    "table4_capacity": table4_capacity,
    "table5_published": table5_published,
    "table6_differences": lambda frame: make_table(published.differences("T1M1"), text_columns=4),
}
