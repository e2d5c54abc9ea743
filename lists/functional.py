"""Casts of `torch.nn.functional`."""

from ampatch.lists.torch_functions import TORCH
from ampatch.table import BANNED, CUSTOM, FP32, LOWER, PROMOTE, CastTable, Row

FUNCTIONAL = CastTable(
    "torch.nn.functional",
    (
        # Products.
        *TORCH.take("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *TORCH.take("conv_tbc", "prelu"),
        Row("linear", LOWER, "tensor-core GEMM, summed in float32"),
        Row("scaled_dot_product_attention", LOWER, "the flash kernels take half only; their softmax is float32 inside"),
        # Arguments of several dtypes, which torch refuses here.
        *TORCH.take("bilinear", "embedding_bag"),
        Row("grid_sample", PROMOTE, "refuses mixed types; half pixel coordinates past 2048 miss whole pixels"),
        # Softmaxes and activations.
        *TORCH.take("softmax", "log_softmax"),
        Row("softmin", FP32, "softmax of -x: sums exp(-x), which passes 65504 at x = -11.09"),
        Row("softplus", FP32, "log(1 + exp(x)): the 1 absorbs exp(x) below x = -7.6 in float16"),
        # Normalizations.
        *TORCH.take("layer_norm", "rms_norm", "group_norm"),
        Row("local_response_norm", CUSTOM, "float32: squares the input; an empty one comes back as it is"),
        Row("normalize", FP32, "divides by a norm; its eps=1e-12 is 0 in float16, so a zero row becomes NaN"),
        # Distances.
        *TORCH.take("cosine_similarity", "pairwise_distance", "pdist"),
        # Losses.
        Row("cross_entropy", FP32, "log_softmax, then a mean over the batch"),
        Row("linear_cross_entropy", PROMOTE, "refuses mixed types in chunks; its parts have rows", since="2.13"),
        Row("nll_loss", FP32, "mean of log probabilities; refuses class weights of another dtype"),
        Row("gaussian_nll_loss", FP32, "divides by a variance, down to eps=1e-6, too small for a normal float16"),
        *TORCH.take("poisson_nll_loss", "kl_div", "binary_cross_entropy_with_logits", "hinge_embedding_loss"),
        *TORCH.take("margin_ranking_loss", "cosine_embedding_loss", "triplet_margin_loss", "ctc_loss"),
        Row("l1_loss", FP32, "sum over the batch: 2048 + 1 is 2048 in float16"),
        Row("mse_loss", FP32, "squares: an error above 255.9 is inf in float16, one below 1.7e-4 is 0"),
        Row("smooth_l1_loss", FP32, "squares the small errors, which float16 rounds to 0 below 1.7e-4"),
        Row("huber_loss", FP32, "squares the small errors, multiplies the large by delta, sums both"),
        Row("multilabel_margin_loss", FP32, "sums a margin for each pair of classes"),
        Row("multilabel_soft_margin_loss", FP32, "sums log sigmoids over the classes"),
        Row("multi_margin_loss", FP32, "sums a margin, perhaps squared, for each class"),
        Row("soft_margin_loss", FP32, "log(1 + exp(-yx)), whose exp passes 65504 at 11.09"),
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
