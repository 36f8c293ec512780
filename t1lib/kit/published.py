"""The reports' published numbers, and where their own data disagrees.

T1M1: "Slide-Style Weight Streaming for Memory-Efficient Transformer Training" (Hu, December 25, 2025), Table 1, and
the repository it names. T1M3: "Practical Output-Layer Memory Mitigation via Chunked Cross-Entropy" (Hu, December 26,
2025), Table 1. Both on a GeForce RTX 3080 Laptop with 16 GB.
"""

from t1lib import paths

# mode: wall time (ms), its standard deviation, peak reserved on the device (GiB), peak resident host memory (GiB)
T1M1 = {
    "gpu": {"wall_ms": 375.0, "wall_std_ms": 7.0, "reserved_gib": 6.31, "host_gib": 1.28},
    "ckpt": {"wall_ms": 479.0, "wall_std_ms": 39.0, "reserved_gib": 6.00, "host_gib": 1.28},
    "slide": {"wall_ms": 1571.0, "wall_std_ms": 12.0, "reserved_gib": 0.93, "host_gib": 4.93},
}

# head: times in ms, memory in GiB; `chunked` is what the code does: by vocabulary (D1), without the weight's gradient
# (D2); `head_alone_ms`, with V = 152064, comes from the repository's data
T1M3 = {
    "full": {"wall_ms": 1282.5, "allocated_gib": 13.08, "reserved_gib": 13.83, "head_ms": 61.5, "backward_ms": 872.7,
             "head_alone_ms": 122.8},
    "chunked": {"wall_ms": 1370.3, "allocated_gib": 9.90, "reserved_gib": 10.70, "head_ms": 88.2, "backward_ms": 926.2,
                "head_alone_ms": 214.5},
}  # fmt: skip

# Cut Cross-Entropy, arXiv 2411.09009, Table 1: the head of Gemma 2 2B (8192 × 256000 × 2304, bfloat16) on an A100-SXM4
# with 80 GB. label: (the kit's variant or "", times in ms, memory in MB as printed (2**20 bytes), gradients included);
# `over_full` is both_ms over that of `full`. Liger computes its gradients in the forward.
CCE: dict[str, tuple[str, dict[str, float]]] = {
    "full": ("full", {"loss_ms": 82, "loss_mb": 24000, "gradient_ms": 121, "gradient_mb": 16000, "both_ms": 207,
                      "both_mb": 28000}),
    "torch.compile": ("compile", {"loss_ms": 49, "loss_mb": 4000, "gradient_ms": 92, "gradient_mb": 12000,
                                  "both_ms": 143, "both_mb": 16000}),
    "torchtune, 8 chunks": ("", {"loss_ms": 55, "loss_mb": 8000, "gradient_ms": 115, "gradient_mb": 1630,
                                 "both_ms": 169, "both_mb": 9631}),
    "Liger": ("liger", {"loss_ms": 302, "loss_mb": 1474, "both_ms": 303, "both_mb": 1474}),
    "CCE": ("cce", {"loss_ms": 46, "loss_mb": 1, "gradient_ms": 100, "gradient_mb": 1163, "both_ms": 145,
                    "both_mb": 1164}),
    "CCE, no vocabulary sorting": ("", {"loss_ms": 45, "loss_mb": 0.1, "gradient_ms": 115, "gradient_mb": 1162,
                                        "both_ms": 159, "both_mb": 1162}),
    "CCE, no gradient filter": ("cce-exact", {"loss_ms": 45, "loss_mb": 0.1, "gradient_ms": 314, "gradient_mb": 1162,
                                              "both_ms": 357, "both_mb": 1162}),
}  # fmt: skip
for _, _values in CCE.values():
    _values["over_full"] = round(_values["both_ms"] / 207, 2)


def differences(report: str) -> list[dict[str, object]]:
    """Rows of a table: where a report ("T1M1" or "T1M3") and its own data differ, and what the kit does instead."""
    page = (paths.root() / "docs" / "differences.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| D")]
    names = "", "the report", "its data or code", "this kit"
    return [dict(zip(names, (key, *told), strict=True)) for key, where, *told in lines if where in (report, "both")]


def digits(metric: str, value: float) -> str:
    """Format specification that prints a published value with the digits with which it was published."""
    return ".2f" if metric.endswith("_gib") else ".0f" if value == int(value) else ".1f"
