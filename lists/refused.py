"""Casts of functions that torch refuses to run on half tensors: in float32 then, and as given where it takes them.

`torch.autocast` leaves these alone, so that they raise under it. Which kernels there are changes from torch to torch:
so torch is asked by a call, on a GPU as on a CPU.
"""

from ampatch.table import CUSTOM, CastTable, Row

_FUNCTIONS_AND_METHODS = (
    Row("cholesky", CUSTOM, "float32 where torch refuses half: no kernel"),
    Row("cholesky_inverse", CUSTOM, "float32 where torch refuses half: no kernel"),
    Row("cholesky_solve", CUSTOM, "float32 where torch refuses half: no kernel"),
    Row("geqrf", CUSTOM, "float32 where torch refuses half: no kernel"),
    Row("lu", CUSTOM, "float32 where torch refuses half: no kernel"),
    Row("lu_solve", CUSTOM, "float32 where torch refuses half: no kernel"),
    Row("ormqr", CUSTOM, "float32 where torch refuses half: no kernel"),
    Row("orgqr", CUSTOM, "float32 where torch refuses half: no kernel"),
    Row("qr", CUSTOM, "float32 where torch refuses half: no kernel"),
    Row("svd", CUSTOM, "float32 where torch refuses half: no kernel"),
    Row("triangular_solve", CUSTOM, "float32 where torch refuses half: no kernel"),
    Row("pinverse", CUSTOM, "float32 where torch refuses half: no kernel of the SVD inside"),
    Row("logdet", CUSTOM, "float32 where torch refuses half: no kernel of the LU inside"),
    Row("slogdet", CUSTOM, "float32 where torch refuses half: no kernel of the LU inside"),
    Row("det", CUSTOM, "float32 where torch refuses half: no kernel of the LU inside"),
    Row("inverse", CUSTOM, "float32 where torch refuses half: no kernel"),
    Row("quantile", CUSTOM, "float32 where torch refuses half: no kernel"),
    Row("nanquantile", CUSTOM, "float32 where torch refuses half: no kernel"),
    Row("histogram", CUSTOM, "float32 where torch refuses half: no kernel"),
)

TORCH_REFUSED = CastTable(
    "torch",
    (
        *_FUNCTIONS_AND_METHODS,
        Row("histogramdd", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("complex", CUSTOM, "float32 where torch refuses half: there is no bfloat16 complex type"),
        Row("polar", CUSTOM, "float32 where torch refuses half: there is no bfloat16 complex type"),
        Row("view_as_complex", CUSTOM, "a float32 copy where torch refuses half: no bfloat16 complex type"),
        Row("fused_moving_avg_obs_fake_quant", CUSTOM, "float32 where torch refuses half; QAT calls it"),
        Row("spmm", CUSTOM, "float32 where torch refuses mixed types: float32 graphs, half nodes"),
        Row("dsmm", CUSTOM, "float32 where torch refuses mixed types: float32 graphs, half nodes"),
    ),
)

TORCH_FUNCTIONAL_REFUSED = CastTable(
    "torch.functional",
    (Row("lu", CUSTOM, "float32 where torch refuses half: no kernel"),),
)

LINALG_REFUSED = CastTable(
    "torch.linalg",
    (
        Row("cholesky", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("cholesky_ex", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("cond", CUSTOM, "float32 where torch refuses half: no kernel of the SVD inside"),
        Row("det", CUSTOM, "float32 where torch refuses half: no kernel of the LU inside"),
        Row("eig", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("eigvals", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("eigh", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("eigvalsh", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("householder_product", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("inv", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("inv_ex", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("ldl_factor", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("ldl_factor_ex", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("ldl_solve", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("lstsq", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("lu", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("lu_factor", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("lu_factor_ex", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("lu_solve", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("matrix_rank", CUSTOM, "float32 where torch refuses half: no kernel of the SVD inside"),
        Row("matrix_sqrth", CUSTOM, "float32 where torch refuses half: no kernel of the eigh inside", since="2.14"),
        Row("polar", CUSTOM, "float32 where torch refuses half: no kernel of the SVD inside", since="2.14"),
        Row("pinv", CUSTOM, "float32 where torch refuses half: no kernel of the SVD inside"),
        Row("qr", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("slogdet", CUSTOM, "float32 where torch refuses half: no kernel of the LU inside"),
        Row("solve", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("solve_ex", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("solve_triangular", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("svd", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("svdvals", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("tensorinv", CUSTOM, "float32 where torch refuses half: no kernel of the inverse inside"),
        Row("tensorsolve", CUSTOM, "float32 where torch refuses half: no kernel of the solve inside"),
        Row("vander", CUSTOM, "float32 where torch refuses half: takes no half"),
    ),
)

SPECIAL_REFUSED = CastTable(
    "torch.special",
    (
        Row("zeta", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("ndtri", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("log_ndtr", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("erfcx", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("airy_ai", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("bessel_j0", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("bessel_j1", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("bessel_y0", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("bessel_y1", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("chebyshev_polynomial_t", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("chebyshev_polynomial_u", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("chebyshev_polynomial_v", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("chebyshev_polynomial_w", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("hermite_polynomial_h", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("hermite_polynomial_he", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("laguerre_polynomial_l", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("legendre_polynomial_p", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("modified_bessel_i0", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("modified_bessel_i1", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("modified_bessel_k0", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("modified_bessel_k1", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("scaled_modified_bessel_k0", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("scaled_modified_bessel_k1", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("shifted_chebyshev_polynomial_t", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("shifted_chebyshev_polynomial_u", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("shifted_chebyshev_polynomial_v", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("shifted_chebyshev_polynomial_w", CUSTOM, "float32 where torch refuses half: no kernel"),
        Row("spherical_bessel_j0", CUSTOM, "float32 where torch refuses half: no kernel"),
    ),
)

SPARSE_REFUSED = CastTable(
    "torch.sparse",
    (
        Row("mm", CUSTOM, "float32 where torch refuses mixed types: float32 graphs, half nodes"),
        Row("addmm", CUSTOM, "float32 where torch refuses mixed types: float32 graphs, half nodes"),
        Row("sampled_addmm", CUSTOM, "float32 where torch refuses mixed types: float32 graphs, half nodes"),
    ),
)

TENSOR_REFUSED = CastTable("torch.Tensor", _FUNCTIONS_AND_METHODS)

REFUSED = (TORCH_REFUSED, TORCH_FUNCTIONAL_REFUSED, LINALG_REFUSED, SPECIAL_REFUSED, SPARSE_REFUSED, TENSOR_REFUSED)
