"""The engine `chunk`: the chunkwise form in torch, as operators."""

from gsa.ops import chunk
from gsa.ops.operators import register

ENGINE = register("chunk", chunk)
