"""Names that scripts of earlier years say and that are gone: since when, and what to write."""

from __future__ import annotations

import collections.abc
import sys

import torch
from torch.torch_version import TorchVersion

from ampatch.apex.legacy.gone.model_urls import FILES
from ampatch.apex.legacy.old import WARNS, Old

GONE = "ampatch.apex.legacy.gone"
OURS, SIX = f"{GONE}.functions", f"{GONE}.torch_six"
CANVAS = "matplotlib.backends.backend_agg.FigureCanvasAgg"


def renamed(place: str, since: str, names: str, to: str = "") -> list[Old]:
    """Returns the rows of names, each followed by that which stands in for it, here or in another place.

    >>> [row.new for row in renamed("base64", "Python 3.9", "encodestring encodebytes")]
    ['base64.encodebytes']
    """
    words = names.split()
    news = [f"{to or place}.{new}" for new in words[1::2]]
    pairs = zip(words[::2], news, strict=True)
    return [Old(f"{place}.{old}", since, new.removeprefix("builtins."), new) for old, new in pairs]


def moved(place: str, since: str, names: str, to: str) -> list[Old]:
    """Returns the rows of names that have another place."""
    return [row for name in names.split() for row in renamed(place, since, f"{name} {name}", to)]


def rewritten(place: str, since: str, /, **remedies: str) -> list[Old]:
    """Returns the rows of names that functions of ours stand in for, with what to write."""
    return [Old(f"{place}.{name}", since, remedy, f"{OURS}.{name}") for name, remedy in remedies.items()]


ABSTRACT = " ".join(sorted({*collections.abc.__all__} - {"Buffer"}))  # which came later
PYTHON = (
    *moved("collections", "Python 3.10", ABSTRACT, "collections.abc"),
    Old("time.clock", "Python 3.8", "time.perf_counter", "time.perf_counter"),
    Old("fractions.gcd", "Python 3.9", "math.gcd", "math.gcd"),
    *rewritten("inspect", "Python 3.11", getargspec="inspect.getfullargspec"),
    *renamed("base64", "Python 3.9", "encodestring encodebytes decodestring decodebytes"),
    Old("os.errno", "Python 3.7", "errno", "errno:"),
    *(
        [Old("cgi", "Python 3.13", "html.escape", f"{OURS}:")]  # nothing else of it
        if sys.version_info >= (3, 13)
        else rewritten("cgi", "Python 3.8", escape="html.escape")
    ),
    Old("threading.Thread.isAlive", "Python 3.9", "is_alive", "threading.Thread.is_alive"),
    Old("imp", "Python 3.12", "importlib"),
    Old("distutils", "Python 3.12", "packaging.version, or setuptools, which brings it back"),
)
BUILTIN = "float float int int object object str str complex complex unicode str"
NUMPY_2 = """
    float_ float64  complex_ complex128  unicode_ str_  string_ bytes_  Inf inf  Infinity inf  infty inf
    PINF inf  NaN nan  NAN nan  product prod  cumproduct cumprod  sometrue any  alltrue all  round_ round
    mat asmatrix  bool8 bool_  int0 intp  uint0 uintp  object0 object_  str0 str_  bytes0 bytes_
    cfloat complex128  singlecomplex complex64  longfloat longdouble  issubsctype issubdtype
    clongfloat clongdouble  longcomplex clongdouble  compare_chararrays char.compare_chararrays
    byte_bounds lib.array_utils.byte_bounds  AxisError exceptions.AxisError
    VisibleDeprecationWarning exceptions.VisibleDeprecationWarning
    ComplexWarning exceptions.ComplexWarning  RankWarning exceptions.RankWarning
"""
NUMPY = (
    *renamed("numpy", "NumPy 1.24", BUILTIN, "builtins"),
    *renamed("numpy", "NumPy 1.24, until 2.0", "bool bool long int", "builtins"),
    *renamed("numpy", "NumPy 2.0", NUMPY_2),
    *rewritten(
        "numpy",
        "NumPy 2.0",
        NINF="-numpy.inf",
        PZERO="0.0",
        NZERO="-0.0",
        msort="numpy.sort(a, axis=0)",
        asfarray="numpy.asarray(a, dtype=float)",
        cast="numpy.asarray(a, dtype)",
        find_common_type="numpy.result_type",
        obj2sctype="numpy.dtype(x).type",
    ),
    Old("numpy.safe_eval", "NumPy 2.0", "ast.literal_eval", "ast.literal_eval"),
    Old("numpy.sctypes", "NumPy 2.0", "a list of types"),
    Old("numpy.recfromcsv", "NumPy 2.0", "numpy.genfromtxt(file, delimiter=',', names=True)"),
    Old("numpy.disp", "NumPy 2.0", "print"),
    Old("numpy.warnings", "NumPy 1.25", "warnings", "warnings:"),
    Old("numpy.linalg.linalg", "NumPy 2.4", "numpy.linalg", "numpy.linalg:"),
    *renamed("numpy", "NumPy 1.23", "alen len", "builtins"),
    *renamed("numpy", "NumPy 1.18", "rank ndim"),
    *renamed("numpy", "NumPy 1.25", "typeDict sctypeDict"),
    *rewritten(
        "numpy.ndarray",
        "NumPy 2.0",
        ptp="numpy.ptp(array)",
        itemset="array[index] = value",
        newbyteorder="array.view(array.dtype.newbyteorder(order))",
    ),
    *rewritten("numpy.ndarray", "NumPy 2.3", tostring="array.tobytes()"),
    *renamed("numpy", "NumPy 2.4", "trapz trapezoid"),
    *rewritten("numpy", "NumPy 2.4", in1d="numpy.isin"),
    *rewritten("numpy", "NumPy 1.23", asscalar="array.item()"),
    Old("numpy.math", "NumPy 2.0", "math", "math:"),
)
LOADER = "torch.utils.data.dataloader"
OTHER_WAY = "arguments the other way round"
LINALG = (  # methods of tensors as well; they work where torch has not removed them yet
    rewritten("torch", "torch 2.14", cholesky="torch.linalg.cholesky", qr="torch.linalg.qr")
    if TorchVersion(torch.__version__) >= "2.14"
    else []
)
TORCH = (
    *LINALG,
    Old("torch._six", "torch 2.0", "str, int, math.inf and collections.abc", f"{SIX}:"),
    *rewritten("torch", "torch 2.0", symeig="torch.linalg.eigh"),
    Old("torch.eig", "torch 1.13", "torch.linalg.eig, which is complex"),
    *rewritten("torch", "torch 1.12", solve=f"torch.linalg.solve, {OTHER_WAY}"),
    Old("torch.gesv", "torch 1.2", f"torch.linalg.solve, {OTHER_WAY}", f"{OURS}.solve"),
    Old("torch.lstsq", "torch 1.13", f"torch.linalg.lstsq, {OTHER_WAY}"),
    Old("torch.gels", "torch 1.3", f"torch.linalg.lstsq, {OTHER_WAY}"),
    *renamed("torch", "torch 1.13", "matrix_rank linalg.matrix_rank"),
    Old("torch.potrf", "torch 1.2", "torch.linalg.cholesky"),
    Old("torch.potrs", "torch 1.2", "torch.cholesky_solve"),
    Old("torch.trtrs", "torch 1.2", "torch.linalg.solve_triangular"),
    Old("torch.btrifact", "torch 1.2", "torch.linalg.lu_factor"),
    Old("torch.btrisolve", "torch 1.2", "torch.linalg.lu_solve"),
    *rewritten(
        "torch",
        "torch 1.8",
        rfft="torch.fft.rfftn, which is complex",
        irfft="torch.fft.irfftn, which takes complex numbers",
        ifft="torch.fft.ifftn, which takes complex numbers",
    ),
    Old("torch.legacy", "torch 1.0", "torch.nn"),
    Old("torch.utils.ffi", "torch 1.0", "torch.utils.cpp_extension"),
    Old("torch.utils.serialization.load_lua", "torch 1.0", "a converted file"),
    Old("torch._utils._accumulate", "torch 2.3", "itertools.accumulate", "itertools.accumulate"),
    *rewritten(LOADER, "torch 1.1", _use_shared_memory="torch.utils.data.get_worker_info"),
    *rewritten(LOADER, "torch 1.2", _DataLoaderIter="iter(loader)"),
    *rewritten(LOADER, "torch 1.1", numpy_type_map="torch.utils.data.default_collate"),
    *(
        Old(f"{place}.{name}", since, remedy, f"{SIX}.{name}")
        for place, since in ((LOADER, "torch 1.5"), ("torch.utils.data._utils.collate", "torch 2.0"))
        for name, remedy in (
            *(("string_classes", "str"), ("int_classes", "int"), ("container_abcs", "collections.abc")),
        )
    ),
    Old("torch.nn.modules.linear._LinearWithBias", "torch 1.9", "torch.nn.Linear", "torch.nn.Linear"),
    Old("torch.distributed.launch", "torch 1.9", "torchrun, which sets LOCAL_RANK", status=WARNS),
    Old("torch.cuda.amp.GradScaler", "torch 2.4", 'torch.amp.GradScaler("cuda")', status=WARNS),
    Old("torch.cuda.amp.autocast", "torch 2.4", 'torch.autocast("cuda")', status=WARNS),
)
WINDOWS = "gaussian hann hamming blackman kaiser tukey triang boxcar"
METRICS = """
    compare_psnr peak_signal_noise_ratio  compare_mse mean_squared_error  compare_nrmse normalized_root_mse
"""
OTHERS = (
    *renamed("PIL.Image", "Pillow 10", "ANTIALIAS LANCZOS LINEAR BILINEAR CUBIC BICUBIC"),
    *renamed("PIL", "Pillow 9", "PILLOW_VERSION __version__"),
    *(Old(f"scipy.misc.{name}", "SciPy 1.3", f"imageio.{name}") for name in ("imread", "imsave")),
    Old("scipy.misc.imresize", "SciPy 1.3", "PIL.Image.Image.resize"),
    Old("scipy.misc.logsumexp", "SciPy 1.3", "scipy.special.logsumexp"),
    *rewritten("PIL.ImageDraw.ImageDraw", "Pillow 10", textsize="draw.textbbox((0, 0), text)"),
    *rewritten("PIL.ImageFont.FreeTypeFont", "Pillow 10", getsize="font.getbbox(text)"),
    *moved("scipy.signal", "SciPy 1.13", WINDOWS, "scipy.signal.windows"),
    *renamed("scipy.integrate", "SciPy 1.14", "trapz trapezoid simps simpson cumtrapz cumulative_trapezoid"),
    *moved("scipy", "SciPy 1.12", "interp", "numpy"),
    *renamed("skimage.measure", "scikit-image 0.18", METRICS, "skimage.metrics"),
    *rewritten("skimage.measure", "scikit-image 0.18", compare_ssim="skimage.metrics.structural_similarity"),
    *rewritten(CANVAS, "matplotlib 3.10", tostring_rgb="canvas.buffer_rgba()"),
    Old("sklearn.externals.joblib", "scikit-learn 0.23", "joblib", "joblib:"),
    Old("sklearn.externals.six", "scikit-learn 0.23", "six", "six:"),
    Old(
        "sklearn.utils.linear_assignment_",
        "scikit-learn 0.23",
        "scipy.optimize.linear_sum_assignment",
        f"{OURS}:",
    ),
    Old("sklearn.cross_validation", "scikit-learn 0.20", "sklearn.model_selection"),
    Old("sklearn.datasets.fetch_mldata", "scikit-learn 0.22", "sklearn.datasets.fetch_openml"),
    *renamed("torchvision.transforms", "torchvision 0.12", "Scale Resize RandomSizedCrop RandomResizedCrop"),
    Old("torchvision.models.utils", "torchvision 0.11", "torch.hub.load_state_dict_from_url", "torch.hub:"),
    Old(
        "torchvision.transforms.functional_tensor",
        "torchvision 0.17",
        "torchvision.transforms.functional",
        "torchvision.transforms._functional_tensor:",
    ),
    *(
        Old(f"torchvision.models.{of}.model_urls", "torchvision 0.15", "weights=", f"{GONE}.model_urls.{of}")
        for of in FILES
    ),
    *rewritten("transformers", "transformers 4.50", AdamW="torch.optim.AdamW"),
    *rewritten("transformers.optimization", "transformers 4.50", AdamW="torch.optim.AdamW"),
    *(
        Old(f"transformers.{file}", "transformers 4.0", f"{place}.{file}", f"{place}.{file}:")
        for name in ("bert", "roberta", "distilbert", "xlnet", "gpt2", "albert", "electra", "bart", "t5")
        for place in (f"transformers.models.{name}",)
        for file in (f"modeling_{name}", f"tokenization_{name}", f"configuration_{name}")
    ),
)
NAMES = (*PYTHON, *NUMPY, *TORCH, *OTHERS)
