"""Figures, tables and numbers: functions of the records alone, by experiment."""

from t1lib.report import chunks, chunks_tables, t1m1, t1m1_tables, t1m3, t1m3_tables

FIGURES = {"chunks": chunks.FIGURES, "t1m1": t1m1.FIGURES, "t1m3": t1m3.FIGURES}
TABLES = {"chunks": chunks_tables.TABLES, "t1m1": t1m1_tables.TABLES, "t1m3": t1m3_tables.TABLES}
NUMBERS = {"chunks": chunks_tables.numbers, "t1m1": t1m1_tables.numbers, "t1m3": t1m3_tables.numbers}
