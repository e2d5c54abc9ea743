"""Casts of functions that torch refuses to run on half tensors: in float32 then, and as given where it takes them.

`torch.autocast` leaves these alone, so that they raise under it. Which kernels there are changes from torch to torch:
so torch is asked by a call, on a GPU as on a CPU.
"""

from ampatch.table import CUSTOM, CastTable, Row


def _refused(why: str, *names: str, since: str | None = None) -> tuple[Row, ...]:
    """The rows of functions that torch refuses for one reason."""
    return tuple(Row(name, CUSTOM, f"float32 where torch refuses {why}", since) for name in names)


_NO_KERNEL = "half: no kernel"
_SVD = "half: no kernel of the SVD inside"
_LU = "half: no kernel of the LU inside"
_SPARSE = "mixed types: float32 graphs, half nodes"

_FUNCTIONS_AND_METHODS = (
    *_refused(_NO_KERNEL, "cholesky", "cholesky_inverse", "cholesky_solve", "geqrf", "lu", "lu_solve", "ormqr"),
    *_refused(_NO_KERNEL, "orgqr", "qr", "svd", "triangular_solve", "inverse"),
    *_refused(_NO_KERNEL, "quantile", "nanquantile", "histogram"),
    *_refused(_SVD, "pinverse"),
    *_refused(_LU, "logdet", "slogdet", "det"),
    *_refused("a value that float16 cannot hold, such as -1e9", "masked_fill"),
)

REFUSED = (
    CastTable(
        "torch",
        (
            *_FUNCTIONS_AND_METHODS,
            *_refused(_NO_KERNEL, "histogramdd"),
            Row("complex", CUSTOM, "float32 on a CPU, where few kernels take complex half, and for bfloat16"),
            *_refused("half: there is no bfloat16 complex type", "polar"),
            Row("view_as_complex", CUSTOM, "a float32 copy where torch refuses half: no bfloat16 complex type"),
            *_refused("half; QAT calls it", "fused_moving_avg_obs_fake_quant"),
            *_refused(_SPARSE, "spmm", "dsmm"),
        ),
    ),
    CastTable("torch.Tensor", _FUNCTIONS_AND_METHODS),
    CastTable("torch.functional", _refused(_NO_KERNEL, "lu")),
    CastTable(
        "torch.linalg",
        (
            *_refused(_NO_KERNEL, "cholesky", "cholesky_ex", "eig", "eigvals", "eigh", "eigvalsh"),
            *_refused(_NO_KERNEL, "householder_product", "inv", "inv_ex", "ldl_factor", "ldl_factor_ex"),
            *_refused(_NO_KERNEL, "ldl_solve", "lstsq", "lu", "lu_factor", "lu_factor_ex", "lu_solve", "qr"),
            *_refused(_NO_KERNEL, "solve", "solve_ex", "solve_triangular", "svd", "svdvals"),
            *_refused(_SVD, "cond", "matrix_rank", "pinv"),
            *_refused(_SVD, "polar", since="2.14"),
            *_refused(_LU, "det", "slogdet"),
            *_refused("half: no kernel of the eigh inside", "matrix_sqrth", since="2.14"),
            *_refused("half: no kernel of the inverse inside", "tensorinv"),
            *_refused("half: no kernel of the solve inside", "tensorsolve"),
            *_refused("half: takes no half", "vander"),
        ),
    ),
    CastTable(
        "torch.special",
        (
            *_refused(_NO_KERNEL, "zeta", "ndtri", "log_ndtr", "erfcx", "airy_ai", "spherical_bessel_j0"),
            *_refused(_NO_KERNEL, "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1"),
            *_refused(_NO_KERNEL, *(f"modified_bessel_{kind}" for kind in ("i0", "i1", "k0", "k1"))),
            *_refused(_NO_KERNEL, "scaled_modified_bessel_k0", "scaled_modified_bessel_k1"),
            *_refused(_NO_KERNEL, *(f"chebyshev_polynomial_{kind}" for kind in "tuvw")),
            *_refused(_NO_KERNEL, *(f"shifted_chebyshev_polynomial_{kind}" for kind in "tuvw")),
            *_refused(_NO_KERNEL, "hermite_polynomial_h", "hermite_polynomial_he"),
            *_refused(_NO_KERNEL, "laguerre_polynomial_l", "legendre_polynomial_p"),
        ),
    ),
    CastTable("torch.sparse", _refused(_SPARSE, "mm", "addmm", "sampled_addmm")),
)
