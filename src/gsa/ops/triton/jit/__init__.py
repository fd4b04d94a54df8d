"""What runs on the GPU: the kernels and the functions they share, all compiled by Triton.

Names in all of them: `t` is the first token of a chunk and `held` the number of its tokens, since the last chunk of a
sequence may be short; C is the size of a full chunk. `late` are queries or output gradients, which read what earlier
tokens have written; `early` are keys or values, which are written. `pairs` are products of the tokens of a chunk with
each other. P says how matrix products are computed (see tiles.product), F is the dtype of sums. A name that begins with
B is the size of a block: BK keys, BV values, BX features, BM slots.
"""
