"""Casts of `torch.nn.functional`."""

from ampatch.table import BANNED, CUSTOM, FP32, LOWER, PROMOTE, CastTable, Row

FUNCTIONAL = CastTable(
    "torch.nn.functional",
    (
        # Products.
        Row("conv1d", LOWER, "tensor-core convolution"),
        Row("conv2d", LOWER, "tensor-core convolution; cuDNN sums in float32 whatever the operands are"),
        Row("conv3d", LOWER, "tensor-core convolution; halves the largest activations of a volume network"),
        Row("conv_transpose1d", LOWER, "tensor cores: the input gradient of conv1d, run forward"),
        Row("conv_transpose2d", LOWER, "tensor cores: the input gradient of conv2d, run forward"),
        Row("conv_transpose3d", LOWER, "tensor cores: the input gradient of conv3d, run forward"),
        Row("conv_tbc", LOWER, "one GEMM for each offset of the kernel"),
        Row("linear", LOWER, "tensor-core GEMM, summed in float32"),
        Row("scaled_dot_product_attention", LOWER, "the flash kernels take half only; their softmax is float32 inside"),
        Row("prelu", LOWER, "refuses mixed types; follows the half activations, and a slope needs little precision"),
        # Arguments of several dtypes, which torch refuses here.
        Row("bilinear", PROMOTE, "refuses mixed types; both inputs and the weight multiply in one product"),
        Row("grid_sample", PROMOTE, "refuses mixed types; half pixel coordinates past 2048 miss whole pixels"),
        Row("embedding_bag", PROMOTE, "refuses per_sample_weights of another dtype than the weight"),
        # Softmaxes and activations.
        Row("softmax", FP32, "sums exp(x), which passes 65504 at x = 11.09"),
        Row("softmin", FP32, "softmax of -x: sums exp(-x), which passes 65504 at x = -11.09"),
        Row("log_softmax", FP32, "log of a sum of exponentials; half keeps 3 digits of a log probability"),
        Row("softplus", FP32, "log(1 + exp(x)): the 1 absorbs exp(x) below x = -7.6 in float16"),
        # Normalizations.
        Row("layer_norm", FP32, "sums squares over the features; 256 squared is past 65504"),
        Row("rms_norm", FP32, "mean of squares: 256 squared is past 65504, 1e-4 squared is 0"),
        Row("group_norm", FP32, "sums squares over channels and pixels, then divides by their root"),
        Row("local_response_norm", CUSTOM, "float32: squares the input; an empty one comes back as it is"),
        Row("normalize", FP32, "divides by a norm; its eps=1e-12 is 0 in float16, so a zero row becomes NaN"),
        # Distances.
        Row("cosine_similarity", FP32, "sums squares over the vector; eps=1e-8 is 0 in float16"),
        Row("pairwise_distance", FP32, "root of a sum of squares of small differences, moved by eps=1e-6"),
        Row("pdist", FP32, "root of a sum of squares of differences; has no half kernel"),
        # Losses.
        Row("cross_entropy", FP32, "log_softmax, then a mean over the batch"),
        Row("linear_cross_entropy", PROMOTE, "refuses mixed types in chunks; its parts have rows", since="2.13"),
        Row("nll_loss", FP32, "mean of log probabilities; refuses class weights of another dtype"),
        Row("gaussian_nll_loss", FP32, "divides by a variance, down to eps=1e-6, too small for a normal float16"),
        Row("poisson_nll_loss", FP32, "exp of the log rate, and log(input + 1e-8), where 1e-8 is 0 in float16"),
        Row("kl_div", FP32, "difference of two logarithms, summed"),
        Row("binary_cross_entropy_with_logits", FP32, "log(1 + exp(-|x|)), summed over the batch"),
        Row("l1_loss", FP32, "sum over the batch: 2048 + 1 is 2048 in float16"),
        Row("mse_loss", FP32, "squares: an error above 255.9 is inf in float16, one below 1.7e-4 is 0"),
        Row("smooth_l1_loss", FP32, "squares the small errors, which float16 rounds to 0 below 1.7e-4"),
        Row("huber_loss", FP32, "squares the small errors, multiplies the large by delta, sums both"),
        Row("hinge_embedding_loss", FP32, "sum over the batch of margins, small differences of close numbers"),
        Row("margin_ranking_loss", FP32, "difference of two scores, which cancels when they are close"),
        Row("multilabel_margin_loss", FP32, "sums a margin for each pair of classes"),
        Row("multilabel_soft_margin_loss", FP32, "sums log sigmoids over the classes"),
        Row("multi_margin_loss", FP32, "sums a margin, perhaps squared, for each class"),
        Row("soft_margin_loss", FP32, "log(1 + exp(-yx)), whose exp passes 65504 at 11.09"),
        Row("cosine_embedding_loss", FP32, "sums products and squares over the vector; eps=1e-12 is 0 in float16"),
        Row("triplet_margin_loss", FP32, "difference of two distances, each the root of a sum of squares"),
        Row("ctc_loss", FP32, "sums paths in log space; has no half kernel"),
        Row("binary_cross_entropy", BANNED, "log of a half sigmoid; use binary_cross_entropy_with_logits"),
        # Resizing. The kernels behind interpolate have no names in Python.
        Row("interpolate", FP32, "weights are fractions of coordinates, and float16 has no odd integers past 2048"),
        Row("upsample", FP32, "older name of interpolate"),
        Row("upsample_bilinear", FP32, "interpolate with mode='bilinear' and aligned corners"),
        Row("upsample_nearest", FP32, "interpolate with mode='nearest'; float32 like the other modes"),
    ),
)

# What `linear_cross_entropy` runs in chunks, forward and backward.
CHUNKED_LOSS = CastTable(
    "torch.nn.modules.linear_cross_entropy",
    (
        Row(
            "_linear_cross_entropy_batch_chunked_accumulator",
            CUSTOM,
            "uncast: has buffers of its own for sums of half logits, and calls exp_ on these",
            since="2.13",
        ),
    ),
)
