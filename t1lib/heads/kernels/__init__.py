"""Triton kernels of head `fused`. Importing this package needs Triton; `t1lib.heads.fused` imports it late.

Terms shared by all of them: tokens are handled in **chunks** of at most `capacity` rows. A chunk's rows are **packed**:
only tokens that count, padded with zero rows to a whole number of tiles. `info` (4) int32 on the
device holds what depends on how many tokens count (`rows.deal`), so that no size has to be known on the host.
Logits are kept in units of log 2 (`z2` = z / ln 2), so that an exponential is one instruction.
"""
