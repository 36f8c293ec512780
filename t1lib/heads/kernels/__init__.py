"""Triton kernels of head `fused`. Importing this package needs Triton; `t1lib.heads.fused` imports it late.

Terms shared by all of them: tokens are taken **in order**, those that count first, and in **chunks** of at most
`capacity` rows, the one at hand from position `start` on. A chunk's hidden states are **packed**, with zero rows after
the last token that counts, up to a whole tile. Only the device knows how many tokens count (`number`), so that the host
never has to wait for it. `row` (fields, tokens) float32 holds what is known of each token, in order (`tiles.FIELDS`).
Logits are kept in units of log 2 (`z2` = z / ln 2), so that an exponential is one instruction.
"""
