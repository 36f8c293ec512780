"""The vocabulary-parallel heads on two and three processes against one, all cases of a size in one set of processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from t1lib.errors import T1Error
from t1lib.heads.parallel import linear_cross_entropy

pytest.importorskip("triton")
from parallel_worker import cases

HERE = Path(__file__).parent
SECONDS = 240
NAMES = [(size, name) for size in (2, 3) for name in cases(size)]


class Outcomes:
    """Tracebacks by process and case, by number of processes; each set of processes runs once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._found = folder, {}

    def of(self, size: int) -> list[dict[str, str]]:
        if size not in self._found:
            self._found[size] = self._run(size)
        return self._found[size]

    def _run(self, size: int) -> list[dict[str, str]]:
        results = [self._folder / f"{size}.{rank}.json" for rank in range(size)]
        command = [sys.executable, str(HERE / "parallel_worker.py")]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes = [
            subprocess.Popen([*command, str(rank), str(size), str(self._folder / f"store{size}"), str(path)], **options)
            for rank, path in enumerate(results)
        ]
        try:
            outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, output in zip(processes, outputs, strict=True):
            assert process.returncode == 0, output[-6000:]
        return [json.loads(path.read_text(encoding="utf-8")) for path in results]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(tmp_path_factory.mktemp("parallel"))


@pytest.mark.parametrize("size, name", NAMES, ids=str)
def test_on_every_process(outcomes, size, name):
    for rank, found in enumerate(outcomes.of(size)):
        assert not found[name], f"rank {rank}: {found[name]}"


def test_without_a_group():
    with pytest.raises(T1Error, match=r"not initialised; call torch\.distributed\.init_process_group"):
        linear_cross_entropy(None, None, None)
