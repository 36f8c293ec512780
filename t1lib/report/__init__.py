"""Figures, tables and numbers of each experiment, as functions of its records alone."""

from t1lib.report import (
    cce,
    cce_numbers,
    cce_tables,
    chunks,
    chunks_tables,
    convergence,
    frontier,
    frontier_numbers,
    parallel,
    parallel_tables,
    t1m1,
    t1m1_tables,
    t1m3,
    t1m3_tables,
)

FIGURES = {
    "cce": cce.FIGURES,
    "chunks": chunks.FIGURES,
    "convergence": convergence.FIGURES,
    "frontier": frontier.FIGURES,
    "parallel": parallel.FIGURES,
    "t1m1": t1m1.FIGURES,
    "t1m3": t1m3.FIGURES,
}
TABLES = {
    "cce": cce_tables.TABLES,
    "chunks": chunks_tables.TABLES,
    "convergence": convergence.TABLES,
    "frontier": frontier.TABLES,
    "parallel": parallel_tables.TABLES,
    "t1m1": t1m1_tables.TABLES,
    "t1m3": t1m3_tables.TABLES,
}
NUMBERS = {
    "cce": cce_numbers.numbers,
    "chunks": chunks_tables.numbers,
    "convergence": convergence.numbers,
    "frontier": frontier_numbers.numbers,
    "parallel": parallel_tables.numbers,
    "t1m1": t1m1_tables.numbers,
    "t1m3": t1m3_tables.numbers,
}
