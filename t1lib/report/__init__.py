"""Figures, tables and numbers of each experiment, as functions of its records alone."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

# Where an experiment's FIGURES, TABLES and `numbers` are. Imported one by one, because they import seaborn, and because
# a run is out of date once a module that it has loaded changes.
_MODULES = {
    "frontier": ("frontier", "frontier", "frontier_numbers"),
    "t1m1": ("t1m1", "t1m1_tables", "t1m1_tables"),
}


def figures_of(experiment: str) -> dict[str, Callable[..., Any]]:
    """An experiment's figures by name, each a function of its records' frame that returns a Matplotlib figure."""
    return _of(experiment, 0, "FIGURES", {})


def tables_of(experiment: str) -> dict[str, Callable[..., Any]]:
    """An experiment's tables by name, each a function of the frame that returns a `t1lib.kit.tables.Table`."""
    return _of(experiment, 1, "TABLES", {})


def numbers_of(experiment: str) -> Callable[..., None]:
    """The function that enters an experiment's numbers, computed from the frame, into a `Numbers`."""
    return _of(experiment, 2, "numbers", lambda frame, out: None)


def _of(experiment: str, place: int, name: str, otherwise: Any) -> Any:
    """An experiment of the user's own may have none of these."""
    modules = _MODULES.get(experiment)
    return getattr(import_module(f"{__name__}.{modules[place]}"), name) if modules else otherwise
