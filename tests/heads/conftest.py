"""One thread for each process that xdist starts: with more, processes wait for each other's threads."""

import os

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        if "PYTEST_XDIST_WORKER" in os.environ:
            patch.setenv("OMP_NUM_THREADS", "1")
            torch.set_num_threads(1)
        yield
    torch.set_num_threads(threads)
