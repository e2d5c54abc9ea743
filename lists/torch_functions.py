"""Casts of the functions of `torch`, `torch.functional`, `torch.linalg`, `torch.special` and `torch.fft`."""

from ampatch.table import CUSTOM, FP32, FP32_INPLACE, LOWER, MATCH_SELF, PROMOTE, CastTable, Row

# In place: self is half and stays half, so the float32 result of the functional form is rounded into it.
IN_PLACE = tuple(
    Row(f"{name}_", FP32_INPLACE, f"{name} runs in float32; x = x.{name}() keeps that")
    for name in (
        *("acos", "arccos", "asin", "arcsin", "cosh", "sinh", "tan", "exp", "expm1"),
        *("log", "log10", "log2", "log1p", "square", "reciprocal", "rsqrt"),
    )
)

TORCH = CastTable(
    "torch",
    (
        # Products.
        Row("conv1d", LOWER, "tensor-core convolution"),
        Row("conv2d", LOWER, "tensor-core convolution; cuDNN sums in float32 whatever the operands are"),
        Row("conv3d", LOWER, "tensor-core convolution; halves the largest activations of a volume network"),
        Row("conv_transpose1d", LOWER, "tensor cores: the input gradient of conv1d, run forward"),
        Row("conv_transpose2d", LOWER, "tensor cores: the input gradient of conv2d, run forward"),
        Row("conv_transpose3d", LOWER, "tensor cores: the input gradient of conv3d, run forward"),
        Row("conv_tbc", LOWER, "one GEMM for each offset of the kernel"),
        Row("convolution", LOWER, "what every conv function above ends in"),
        Row("_convolution", LOWER, "what torch.jit.trace writes for every convolution"),
        Row("matmul", LOWER, "tensor-core GEMM, summed in float32"),
        Row("mm", LOWER, "tensor-core GEMM, summed in float32"),
        Row("bmm", LOWER, "batched tensor-core GEMM"),
        Row("mv", LOWER, "matrix-vector product: bound by reading the matrix, half the bytes"),
        Row("addmm", LOWER, "tensor-core GEMM with the sum fused in"),
        Row("addmv", LOWER, "matrix-vector product with the sum fused in; half the bytes"),
        Row("addr", LOWER, "outer product plus a matrix: bound by the matrix, half the bytes"),
        Row("addbmm", LOWER, "batched tensor-core GEMM, reduced over the batch"),
        Row("baddbmm", LOWER, "batched tensor-core GEMM with the sum fused in"),
        Row("chain_matmul", LOWER, "a chain of GEMMs that ATen calls itself, out of a patch's sight"),
        Row("einsum", LOWER, "a bmm inside ATen, out of sight of a patch; left alone where it sums no products"),
        Row("matrix_power", CUSTOM, "multiplies in half; inverts first for a negative power, as half has no inverse"),
        Row("prelu", LOWER, "refuses mixed types; follows the half activations, and a slope needs little precision"),
        # Recurrent networks, whose weights come as a list.
        Row("lstm", LOWER, "cuDNN runs every gate's GEMM on tensor cores, over all time steps"),
        Row("gru", LOWER, "cuDNN runs every gate's GEMM on tensor cores, over all time steps"),
        Row("rnn_tanh", LOWER, "one GEMM a time step; tanh keeps the state between -1 and 1"),
        Row("rnn_relu", LOWER, "one GEMM a time step"),
        Row("lstm_cell", LOWER, "two GEMMs and one fused kernel for the gates"),
        Row("gru_cell", LOWER, "two GEMMs and one fused kernel for the gates"),
        Row("rnn_tanh_cell", LOWER, "two GEMMs; tanh keeps the state between -1 and 1"),
        Row("rnn_relu_cell", LOWER, "two GEMMs"),
        # Arguments of several dtypes, which torch refuses here.
        Row("bilinear", PROMOTE, "refuses mixed types; both inputs and the weight multiply in one product"),
        Row("cross", PROMOTE, "refuses mixed types; differences of products cancel, so the wider type counts"),
        Row("dot", PROMOTE, "refuses mixed types; one long sum, which the wider type keeps in range"),
        Row("vdot", PROMOTE, "refuses mixed types; dot with the first argument conjugated"),
        Row("inner", PROMOTE, "refuses mixed types; a tensordot over the last dimension"),
        Row("tensordot", PROMOTE, "refuses mixed types; autocast promotes it too, unlike matmul"),
        Row("lerp", PROMOTE, "refuses mixed types; the moving average of a float32 buffer and half values"),
        Row("embedding_bag", PROMOTE, "refuses per_sample_weights of another dtype than the weight"),
        Row("grid_sampler", PROMOTE, "refuses mixed types; half pixel coordinates past 2048 miss whole pixels"),
        Row("grid_sampler_2d", PROMOTE, "refuses mixed types; half pixel coordinates past 2048 miss whole pixels"),
        Row("grid_sampler_3d", PROMOTE, "refuses mixed types; half pixel coordinates past 2048 miss whole pixels"),
        Row("isclose", PROMOTE, "refuses mixed types; a half result is compared with a float32 one"),
        Row("allclose", PROMOTE, "refuses mixed types; a half result is compared with a float32 one"),
        Row("heaviside", PROMOTE, "refuses mixed types, although it is pointwise"),
        Row("meshgrid", PROMOTE, "refuses mixed types; coordinates of several origins"),
        Row("cartesian_prod", PROMOTE, "refuses mixed types: a meshgrid inside"),
        Row("index_add", PROMOTE, "refuses a half source for a float32 tensor; accumulates"),
        Row("index_copy", PROMOTE, "refuses a half source for a float32 tensor"),
        Row("index_put", PROMOTE, "refuses half values for a float32 tensor"),
        Row("index_reduce", PROMOTE, "refuses a half source for a float32 tensor; products leave the half range"),
        Row("masked_scatter", PROMOTE, "refuses a half source for a float32 tensor"),
        Row("put", PROMOTE, "refuses a half source for a float32 tensor"),
        Row("scatter", PROMOTE, "refuses a half src for a float32 tensor"),
        Row("scatter_add", PROMOTE, "refuses a half src for a float32 tensor; accumulates"),
        Row("scatter_reduce", PROMOTE, "refuses a half src for a float32 tensor; accumulates"),
        Row("addmv_", MATCH_SELF, "refuses mixed types; the result must fit into self"),
        Row("index_put_", MATCH_SELF, "refuses values of another dtype than self"),
        # Pointwise functions.
        Row("acos", FP32, "infinite slope at 1, where float16 has steps of 4.9e-4"),
        Row("arccos", FP32, "acos by another name"),
        Row("asin", FP32, "infinite slope at 1, where float16 has steps of 4.9e-4"),
        Row("arcsin", FP32, "asin by another name"),
        Row("cosh", FP32, "grows like exp(|x|) / 2 and passes 65504 at |x| = 11.78"),
        Row("sinh", FP32, "grows like exp(|x|) / 2 and passes 65504 at |x| = 11.78"),
        Row("tan", FP32, "poles: near pi/2 one float16 step of x, 9.8e-4, changes everything"),
        Row("erfinv", FP32, "infinite slope at 1, where float16 has steps of 4.9e-4"),
        Row("exp", FP32, "passes 65504, the largest float16, at x = 11.09"),
        Row("expm1", FP32, "passes 65504 at x = 11.09; exists for the digits near 0 that half drops"),
        Row("log", FP32, "probabilities below 3e-8 are 0 in float16, and their log is -inf"),
        Row("log10", FP32, "probabilities below 3e-8 are 0 in float16, and their log is -inf"),
        Row("log2", FP32, "probabilities below 3e-8 are 0 in float16, and their log is -inf"),
        Row("log1p", FP32, "exists for the digits near 0 that half drops"),
        Row("pow", FP32, "256 squared is past 65504; 1e-4 squared is 0"),
        Row("square", FP32, "256 squared is past 65504; ATen calls pow out of a patch's sight"),
        Row("reciprocal", FP32, "1/x passes 65504 below x = 1.5e-5, where float16 still has numbers"),
        Row("rsqrt", FP32, "mostly of a variance, whose eps of 1e-8 is 0 in float16: 1/sqrt(0) is inf"),
        # Reductions and norms.
        Row("sum", FP32, "a sum of n terms leaves the range of its terms; 2048 + 1 is 2048 in float16"),
        Row("prod", FP32, "16 factors of 2 are past 65504; 25 factors of 1/2 are 0"),
        Row("cumsum", FP32, "running sum, whose late terms no longer count: 2048 + 1 is 2048 in float16"),
        Row("cumprod", FP32, "running product, out of range after 16 doublings"),
        Row("trapezoid", FP32, "a sum inside ATen, out of a patch's sight"),
        Row("trapz", FP32, "trapezoid by its older name"),
        Row("cumulative_trapezoid", FP32, "a cumsum inside ATen, out of a patch's sight"),
        Row("logsumexp", FP32, "log of a sum of exponentials; autocast runs it like the softmaxes"),
        Row("softmax", FP32, "sums exp(x), which passes 65504 at x = 11.09"),
        Row("log_softmax", FP32, "log of a sum of exponentials; half keeps 3 digits of a log probability"),
        Row("norm", FP32, "root of a sum of squares; 256 squared is past 65504"),
        Row("frobenius_norm", FP32, "root of the sum of all squares of a matrix"),
        Row("nuclear_norm", FP32, "sum of singular values, and the SVD has no half kernel"),
        Row("renorm", FP32, "divides by a norm: a sum of powers"),
        Row("norm_except_dim", FP32, "a norm inside ATen, out of a patch's sight"),
        Row("_weight_norm", FP32, "divides by a norm inside ATen; what weight_norm calls"),
        Row("dist", FP32, "norm of a difference: a sum of powers"),
        Row("cdist", FP32, "takes squared distances as |a|^2 - 2ab + |b|^2, which cancels"),
        Row("pdist", FP32, "root of a sum of squares of differences; has no half kernel"),
        Row("pairwise_distance", FP32, "root of a sum of squares of small differences, moved by eps=1e-6"),
        Row("cosine_similarity", FP32, "sums squares over the vector; eps=1e-8 is 0 in float16"),
        # Normalizations.
        Row("layer_norm", FP32, "sums squares over the features; 256 squared is past 65504"),
        Row("native_layer_norm", FP32, "layer_norm that returns its mean and 1/std as well"),
        Row("rms_norm", FP32, "mean of squares: 256 squared is past 65504, 1e-4 squared is 0"),
        Row("group_norm", FP32, "sums squares over channels and pixels, then divides by their root"),
        # Losses.
        Row("binary_cross_entropy_with_logits", FP32, "log(1 + exp(-|x|)), summed over the batch"),
        Row("cosine_embedding_loss", FP32, "sums products and squares over the vector; eps=1e-12 is 0 in float16"),
        Row("ctc_loss", FP32, "sums paths in log space; has no half kernel"),
        Row("hinge_embedding_loss", FP32, "sum over the batch of margins, small differences of close numbers"),
        Row("kl_div", FP32, "difference of two logarithms, summed"),
        Row("margin_ranking_loss", FP32, "difference of two scores, which cancels when they are close"),
        Row("poisson_nll_loss", FP32, "exp of the log rate, and log(input + 1e-8), where 1e-8 is 0 in float16"),
        Row("triplet_margin_loss", FP32, "difference of two distances, each the root of a sum of squares"),
        # Spectra.
        Row("stft", CUSTOM, "one rfft a frame; float32 where torch has no half transform"),
        *IN_PLACE,
    ),
)

# The same functions as in `torch`, where scripts of torch 1 also look for them.
TORCH_FUNCTIONAL = CastTable(
    "torch.functional",
    TORCH.take("chain_matmul", "einsum", "tensordot", "meshgrid", "cartesian_prod", "cdist", "norm", "stft"),
)

# Where `torch.nn.LSTM` and its siblings look their functions up.
VF = CastTable(
    "torch._VF",
    TORCH.take("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
)

LINALG = CastTable(
    "torch.linalg",
    (
        *TORCH.take("matmul", "matrix_power", "cross"),
        Row("multi_dot", LOWER, "a chain of GEMMs that ATen calls itself, out of a patch's sight"),
        Row("vecdot", LOWER, "batched dot products; autocast has them with the matmul family"),
        Row("norm", FP32, "root of a sum of squares, or the SVD of a matrix, which has no half kernel"),
        Row("vector_norm", FP32, "root of a sum of powers; 256 squared is past 65504"),
        Row("matrix_norm", FP32, "sum of squares, or the SVD for ord 2, -2 and 'nuc', which has no half kernel"),
    ),
)

SPECIAL = CastTable(
    "torch.special",
    TORCH.take("erfinv", "expm1", "log1p", "logsumexp", "softmax", "log_softmax"),
)

# Autocast has no rule for these. Torch transforms half on a GPU alone, float16 alone, in sizes that are powers of two.
FFT = CastTable(
    "torch.fft",
    tuple(
        Row(f"{name}{dims}", CUSTOM, "bin 0 is the sum of every element; float32 where torch has no half transform")
        for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
        for dims in ("", "2", "n")
    ),
)
