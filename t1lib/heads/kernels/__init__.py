"""Triton kernels of head `fused`. Tokens are taken **in order**, those that count first, in **chunks** of at most
`capacity` rows, the one at hand from position `start` on. A chunk's hidden states are **packed**, with zero rows after
the last token that counts, up to a whole tile. Only the device knows how many count (`number`): the host never waits
for it. `row` (fields, tokens) float32 holds what is known of each token, in order (`tiles.FIELDS`). Logits are in units
of log 2 (`z2` = z / ln 2), so that an exponential is one instruction."""
