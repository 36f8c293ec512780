"""The worker of test_heads_parallel.py: every process runs every case, in the same order."""

import sys
from functools import partial
from pathlib import Path

from parallel_cases import Cases, edges, exact, kernels
from parallel_manners import groups_made_anew, manners
from parallel_refusals import refusals
from processes import work


def cases(size: int) -> Cases:
    return {**exact(size), **edges(size), **kernels(size), **manners(size), **refusals(size)}


def alone(size: int) -> Cases:
    return {"groups made anew": partial(groups_made_anew, size)}


if __name__ == "__main__":
    work(Path(sys.argv[1]), lambda size, folder: cases(size), lambda size, folder: alone(size))
