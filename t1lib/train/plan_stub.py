from dataclasses import dataclass
PIECE = 5 << 19
SLOTS = 5
ROOM = 80
LEAVING = 2
ROWS = 2048
GATHERED = 8
def slots_for(nbytes): return max(SLOTS, ROOM // nbytes)
@dataclass(frozen=True)
class Choice:
    slots: int = 2
    resident: int = 0
    keep: int = 0
    inputs: str = "device"
    outer: str = "device"
    grad_slots: int = 2
    host_share: float = 0.0
