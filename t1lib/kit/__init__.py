"""What the notebooks share: a run and its files, selections from its samples, tables, and the style of figures."""
