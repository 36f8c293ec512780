"""A line that shows how far a measuring cell has come: in JupyterLab, in a terminal and in an executed notebook."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress(items: Iterable[Any] | None = None, what: str = "", total: int | None = None) -> tqdm:
    """Iterate over `items`, with a line as soon as that has taken two seconds; or a bar to be moved with `update`."""
    return tqdm(items, what, total, file=sys.stdout, delay=2, mininterval=0.5, ncols=90)
