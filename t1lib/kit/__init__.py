"""What the notebooks share: a run and its files, tables, and the style of figures."""
