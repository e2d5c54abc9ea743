"""The cast tables: which torch function runs in which dtype, and why. Data only."""

if __name__ != "ampatch.lists":
    raise ImportError(f"import ampatch.lists, not {__name__}: this would be a second copy of the tables")

from ampatch.lists.functional import FUNCTIONAL
from ampatch.lists.recurrent import TORCH_RECURRENT, VF
from ampatch.lists.tensor_methods import TENSOR
from ampatch.lists.torch_functions import FFT, LINALG, SPECIAL, TORCH, TORCH_FUNCTIONAL

TABLES = (FUNCTIONAL, TORCH, TORCH_FUNCTIONAL, LINALG, SPECIAL, FFT, VF, TORCH_RECURRENT, TENSOR)

# What torch.autocast lists for CUDA (ATen/autocast_mode.h, torch 2.13) and no table here does, with the reason.
AUTOCAST_WITHOUT_ROW = (
    ("_scaled_dot_product_flash_attention", "chosen inside scaled_dot_product_attention, after that row's cast"),
    ("_thnn_fused_gru_cell", "no name in Python; chosen inside gru_cell, after that row's cast"),
    ("_thnn_fused_lstm_cell", "no name in Python; chosen inside lstm_cell, after that row's cast"),
    ("nll_loss2d", "no public name; chosen inside nll_loss, after that row's cast"),
    ("upsample_nearest1d", "no public name; chosen inside interpolate, after that row's cast"),
    ("_upsample_nearest_exact1d", "no public name; chosen inside interpolate, after that row's cast"),
    ("upsample_nearest2d", "no public name; chosen inside interpolate, after that row's cast"),
    ("_upsample_nearest_exact2d", "no public name; chosen inside interpolate, after that row's cast"),
    ("upsample_nearest3d", "no public name; chosen inside interpolate, after that row's cast"),
    ("_upsample_nearest_exact3d", "no public name; chosen inside interpolate, after that row's cast"),
    ("upsample_linear1d", "no public name; chosen inside interpolate, after that row's cast"),
    ("upsample_bilinear2d", "no public name; chosen inside interpolate, after that row's cast"),
    ("_upsample_bilinear2d_aa", "no public name; chosen inside interpolate, after that row's cast"),
    ("upsample_trilinear3d", "no public name; chosen inside interpolate, after that row's cast"),
    ("upsample_bicubic2d", "no public name; chosen inside interpolate, after that row's cast"),
    ("_upsample_bicubic2d_aa", "no public name; chosen inside interpolate, after that row's cast"),
    ("addcdiv", "torch promotes it natively"),
    ("addcmul", "torch promotes it natively"),
    ("atan2", "torch promotes it natively"),
)
