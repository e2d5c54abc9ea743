"""Where a patched torch and `torch.autocast` for CUDA part on purpose, by the names in torch's OpInfo database.

A function whose row is CUSTOM or FP32 needs no entry where it runs and torch refuses half, and autocast with it.
"""

# (op, reason): the result has another type than under autocast, or one of the two raises.
DIFFERENT_FROM_AUTOCAST = (
    ("_upsample_bilinear2d_aa", "an operator of ATen by itself, which no Python name leads to; interpolate has a row"),
    ("nn.functional.interpolate.area", "float32 as in every other mode; autocast leaves this one, a mean, alone"),
    ("nn.functional.binary_cross_entropy", "takes float32, as apex did; autocast raises whatever the types are"),
    ("einsum", "left as it is where no products are summed: positions times frequencies lose whole turns in half"),
    ("linalg.pinv.singular", "float32 where torch refuses half: the sample multiplies matrices; autocast raises"),
)

# What torch.autocast lists for CUDA (ATen/autocast_mode.h, torch 2.13) and no table here does, with the reason.
AUTOCAST_WITHOUT_ROW = (
    ("_scaled_dot_product_flash_attention", "chosen inside scaled_dot_product_attention, after that row's cast"),
    ("_thnn_fused_gru_cell", "no name in Python; chosen inside gru_cell, after that row's cast"),
    ("_thnn_fused_lstm_cell", "no name in Python; chosen inside lstm_cell, after that row's cast"),
    ("nll_loss2d", "no public name; chosen inside nll_loss, after that row's cast"),
    *(
        (name, "no public name; chosen inside interpolate, after that row's cast")
        for name in (
            *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
            *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
            *("upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d"),
            *("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
        )
    ),
    ("addcdiv", "torch promotes it natively"),
    ("addcmul", "torch promotes it natively"),
    ("atan2", "torch promotes it natively"),
)
