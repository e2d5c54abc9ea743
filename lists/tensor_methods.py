"""Casts of the methods and operators of `torch.Tensor`."""

from ampatch.lists.torch_functions import IN_PLACE, TORCH
from ampatch.table import CUSTOM, FP32, FP32_INPLACE, LOWER, MATCH_SELF, CastTable, Row

TENSOR = CastTable(
    "torch.Tensor",
    (
        # Products.
        Row("__matmul__", LOWER, "a @ b is a tensor-core GEMM"),
        Row("__rmatmul__", LOWER, "a @ b of an a that leaves the product to b"),
        *TORCH.take("matmul", "mm", "bmm", "mv", "addmm", "addmv", "addr", "addbmm", "baddbmm"),
        *TORCH.take("matrix_power", "prelu"),
        # Arguments of several dtypes, which torch refuses here.
        *TORCH.take("cross", "dot", "vdot", "inner", "isclose", "allclose", "heaviside", "lerp"),
        *TORCH.take("index_add", "index_copy", "index_put", "index_reduce", "masked_scatter", "put"),
        *TORCH.take("scatter", "scatter_add", "scatter_reduce"),
        # The same in place: self keeps its dtype, the others follow.
        *TORCH.take("addmv_", "index_put_"),
        Row("__setitem__", MATCH_SELF, "x[mask] = y refuses a y of another dtype, although x[1:] = y takes it"),
        Row("addmm_", MATCH_SELF, "refuses mixed types; adds half products to a float32 buffer"),
        Row("addbmm_", MATCH_SELF, "refuses mixed types; adds half products to a float32 buffer"),
        Row("baddbmm_", MATCH_SELF, "refuses mixed types; adds half products to a float32 buffer"),
        Row("heaviside_", MATCH_SELF, "refuses mixed types, although it is pointwise"),
        Row("lerp_", MATCH_SELF, "refuses mixed types; the moving average kept in a float32 buffer"),
        Row("index_add_", MATCH_SELF, "refuses a source of another dtype than self"),
        Row("index_copy_", MATCH_SELF, "refuses a source of another dtype than self"),
        Row("index_reduce_", MATCH_SELF, "refuses a source of another dtype than self"),
        Row("masked_scatter_", MATCH_SELF, "refuses a source of another dtype than self"),
        Row("put_", MATCH_SELF, "refuses a source of another dtype than self"),
        Row("scatter_", MATCH_SELF, "refuses a src of another dtype than self"),
        Row("scatter_add_", MATCH_SELF, "refuses a src of another dtype than self"),
        Row("scatter_reduce_", MATCH_SELF, "refuses a src of another dtype than self"),
        # Pointwise functions.
        *TORCH.take("acos", "arccos", "asin", "arcsin", "cosh", "sinh", "tan", "erfinv", "exp", "expm1"),
        *TORCH.take("log", "log10", "log2", "log1p", "pow", "square", "reciprocal", "rsqrt"),
        Row("__pow__", FP32, "x ** 2: 256 squared is past 65504; 1e-4 squared is 0"),
        Row("__rpow__", FP32, "2 ** x passes 65504 at x = 16"),
        Row("__ipow__", FP32_INPLACE, "x **= 2 writes a float32 power into x, and a half one into a half x"),
        # Reductions and norms.
        *TORCH.take("sum", "prod", "cumsum", "cumprod", "logsumexp", "softmax", "log_softmax"),
        *TORCH.take("norm", "renorm", "dist"),
        Row("sum_to_size", CUSTOM, "float32 if it sums: inside ATen, out of a patch's sight; else self comes back"),
        # Copies.
        Row("cpu", CUSTOM, "float32 from a half tensor, for numpy and lists; torch's own calls keep the type"),
        # In place.
        *IN_PLACE,
        Row("erfinv_", FP32_INPLACE, "erfinv runs in float32; x = x.erfinv() keeps that"),
        Row("pow_", FP32_INPLACE, "256 squared is past 65504, inf in a float16 x; x = x.pow(2) is float32"),
        Row("cumsum_", FP32_INPLACE, "running sum, each term rounded once; x = x.cumsum(dim) keeps float32"),
        Row("cumprod_", FP32_INPLACE, "running product, each term rounded once; x = x.cumprod(dim) keeps float32"),
        Row("renorm_", FP32_INPLACE, "renorm runs in float32; x = x.renorm(p, dim, maxnorm) keeps that"),
    ),
)
