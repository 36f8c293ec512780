"""Real text for language models, and the command `python -m t1lib train`."""
