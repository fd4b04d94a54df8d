"""The engine `native`: the compiled kernels, as operators."""

from gsa.ops.native import kernels
from gsa.ops.operators import register

ENGINE = register("native", kernels)
