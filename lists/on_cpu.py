"""What a CPU has no half kernel for: functions at O1 and O4, modules at O2, O3 and O5.

These rows hold on a CPU alone. On a GPU, where the kernels exist, nothing is cast.
"""

from ampatch.table import CUSTOM, FP32, CastTable, Row

_MATRIX_EXP = Row("matrix_exp", CUSTOM, "float32 on a CPU, whose half kernel returns wrong numbers")
_RRELU = Row("rrelu", CUSTOM, "float32 where a CPU refuses float16")
FUNCTIONS_ON_CPU = (
    CastTable(
        "torch.nn.functional",
        (
            Row("avg_pool3d", CUSTOM, "float32 on a CPU, which has half kernels of avg_pool1d and avg_pool2d alone"),
            _RRELU,
        ),
    ),
    CastTable("torch", (_RRELU, _MATRIX_EXP)),
    CastTable("torch.linalg", (_MATRIX_EXP,)),
    CastTable("torch.Tensor", (_MATRIX_EXP,)),
    CastTable(
        "torch.special",
        (
            Row("i1", CUSTOM, "float32 on a CPU, which has no half kernel of its backward", until="2.15"),
            Row("i1e", CUSTOM, "float32 on a CPU, which has no half kernel of its backward", until="2.15"),
        ),
    ),
)

# In a half model on a CPU these compute in float32 and take and return half, as on a GPU.
MODULES_ON_CPU = CastTable(
    "torch.nn",
    (
        Row("AvgPool3d", FP32, "avg_pool3d has no half kernel on a CPU"),
        Row("LPPool3d", FP32, "ends in avg_pool3d, which has no half kernel on a CPU"),
        Row("LocalResponseNorm", FP32, "ends in avg_pool3d for images, which has no half kernel on a CPU"),
        Row("RReLU", FP32, "rrelu has no float16 kernel on a CPU"),
        Row("CTCLoss", FP32, "ctc_loss has no half kernel on a CPU"),
        Row("MultiMarginLoss", FP32, "multi_margin_loss has no half kernel on a CPU"),
        Row("SmoothL1Loss", FP32, "smooth_l1_loss has no half gradient on a CPU", until="2.11"),
        Row("MultiLabelMarginLoss", FP32, "multilabel_margin_loss has no half kernel on a CPU"),
    ),
)
