"""When a `HostStore` takes and frees device memory follows from what the compute lane waits for, not from the host."""

import weakref
from contextlib import nullcontext

import torch

from t1lib.measure.timing import NoTrace
from t1lib.train.store import LEAVING, HostStore

CPU = torch.device("cpu")


class NotedLane:
    """Its marks are its name and a number; it notes the marks that it has waited for."""

    def __init__(self, name: str) -> None:
        self.name, self.count, self.waited, self.stream = name, 0, [], None

    def active(self):
        return nullcontext()

    def mark(self):
        self.count += 1
        return self.name, self.count

    def after(self, mark) -> None:
        if mark is not None:
            self.waited.append(mark)


def test_no_memory_is_given_back_before_the_computing_has_waited_for_its_copy():
    compute, inward, outward = (NotedLane(name) for name in ("compute", "in", "out"))
    store, alive = HostStore(CPU, compute, inward, outward, NoTrace), {}
    for group in range(1, 6):
        tensor = torch.full((3,), float(group))
        store.put((group, 0), tensor)
        alive[group] = weakref.ref(tensor)
        del tensor
        left = [g for g in alive if alive[g]() is None]
        assert left == list(range(1, group - LEAVING + 1))
        assert compute.waited == [("out", g) for g in left]  # the copy of group g was the g-th on its lane
    for group in reversed(range(1, 6)):
        came, before = inward.count, compute.count
        brought = store.bring((group, 0))
        assert brought.tolist() == [group] * 3
        if group > 5 - LEAVING:  # it has not left the device: nothing is copied
            assert brought is alive[group]() and inward.count == came
        else:  # copied to memory that the computation may have used until now
            assert inward.waited[-1] == ("compute", before + 1)
        store.arrived(group)
        assert compute.waited[-1] == (("out", group) if group > 5 - LEAVING else ("in", inward.count))
        del brought
        assert alive[group]() is None


def test_what_a_step_that_was_given_up_left_behind_is_waited_for():
    compute, inward, outward = (NotedLane(name) for name in ("compute", "in", "out"))
    store = HostStore(CPU, compute, inward, outward, NoTrace)
    for group in (1, 2, 3, 4):
        store.put((group, 0), torch.zeros(3))
    store.bring((2, 0))
    waited = len(compute.waited)
    store.arrived(2)
    store.arrived(4)
    assert compute.waited[waited:] == [("in", 1), ("out", 4)]
