"""What scripts of earlier years say and that breaks today: since when, what to write, what puts it back."""

from __future__ import annotations

import collections.abc
import functools
import sys
from dataclasses import dataclass

import torch
from torch.torch_version import TorchVersion

BREAKS, MAY_BREAK, WARNS, NEEDS_CUDA = "BREAKS", "may break", "warns", "needs CUDA"


@dataclass(frozen=True, slots=True)
class Old:
    """One thing that scripts say: a dotted name, or a pattern of code that patterns.py knows by this name.

    `since` is the first version that does not take it, and may say until which. `new` is the dotted name
    of what `ampatch run --legacy` puts in the place of a name, with a colon after that of a module;
    `mends` says that it mends the pattern.
    `error` is a pattern of the error and of the function that raised it, for what dies in lines that do
    not show it.
    """

    name: str
    since: str
    remedy: str
    new: str | None = None
    status: str = BREAKS
    mends: bool = False
    error: str = ""

    @property
    def is_mended(self) -> bool:
        return self.mends or self.new is not None

    @property
    def is_module(self) -> bool:
        return self.new is not None and self.new.endswith(":")

    @property
    def advice(self) -> str:
        """Since when it breaks, what to write, and whether it can run as it is."""
        if self.status == NEEDS_CUDA:
            return self.remedy
        mended = "; `ampatch run --legacy` fixes it" if self.is_mended else ""
        return f"since {self.since}: use {self.remedy}{mended}"


REMOVED = "ampatch.apex.legacy.removed"
SIX = f"{REMOVED}.torch_six"
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
    return [Old(f"{place}.{name}", since, remedy, f"{REMOVED}.{name}") for name, remedy in remedies.items()]


ABSTRACT = " ".join(sorted({*collections.abc.__all__} - {"Buffer"}))  # which came later
PYTHON = (
    *moved("collections", "Python 3.10", ABSTRACT, "collections.abc"),
    Old("time.clock", "Python 3.8", "time.perf_counter", "time.perf_counter"),
    Old("fractions.gcd", "Python 3.9", "math.gcd", "math.gcd"),
    *rewritten("inspect", "Python 3.11", getargspec="inspect.getfullargspec"),
    *renamed("base64", "Python 3.9", "encodestring encodebytes decodestring decodebytes"),
    Old("os.errno", "Python 3.7", "errno", "errno:"),
    *(
        [Old("cgi", "Python 3.13", "html.escape", f"{REMOVED}:")]  # nothing else of it
        if sys.version_info >= (3, 13)
        else rewritten("cgi", "Python 3.8", escape="html.escape")
    ),
    Old("threading.Thread.isAlive", "Python 3.9", "is_alive", "threading.Thread.is_alive"),
    Old("imp", "Python 3.12", "importlib"),
    Old("imghdr", "Python 3.13", "PIL.Image.open(file).format"),
    Old("pipes", "Python 3.13", "shlex.quote, or subprocess"),
    Old("pkg_resources", "setuptools 82", "importlib.metadata"),
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
    *moved("numpy.lib", "NumPy 2.0", "pad", "numpy"),
    *(
        Old(f"numpy.lib.{name}", "NumPy 2.0", "numpy", "numpy:")
        for name in ("arraysetops", "function_base", "index_tricks", "shape_base")
    ),
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
    Old("torch.gesv", "torch 1.2", f"torch.linalg.solve, {OTHER_WAY}", f"{REMOVED}.solve"),
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
    *renamed("torch.hub", "torch 1.4", "_download_url_to_file download_url_to_file"),
    *renamed("torch.utils.model_zoo", "torch 1.1", "_download_url_to_file download_url_to_file", "torch.hub"),
    *moved("torch.utils.model_zoo", "torch 1.1", "HASH_REGEX urlparse", "torch.hub"),
    *rewritten("torch.autograd.gradcheck", "torch 1.9", zero_gradients="x.grad = None"),
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
WINDOWS = """
    gaussian general_gaussian hann hamming blackman blackmanharris nuttall bartlett barthann bohman boxcar
    triang parzen flattop kaiser tukey cosine chebwin exponential
"""
MODELS = "bert roberta distilbert xlnet gpt2 albert electra bart t5 openai xlm xlm_roberta camembert ctrl"
BERT = "transformers.models.bert.modeling_bert"
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
        f"{REMOVED}:",
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
        row
        for file in (
            "resnet",
            "vgg",
            "densenet",
            "alexnet",
            "squeezenet",
            "inception",
            "googlenet",
            "mobilenet",
        )
        for place in (f"torchvision.models.{file}",)
        for row in (
            Old(f"{place}.model_urls", "torchvision 0.15", "weights=", f"{REMOVED}.model_urls.{file}"),
            *moved(place, "torchvision 0.13", "load_state_dict_from_url", "torch.hub"),
        )
    ),
    *rewritten("transformers", "transformers 4.50", AdamW="torch.optim.AdamW"),
    *rewritten("transformers.optimization", "transformers 4.50", AdamW="torch.optim.AdamW"),
    *rewritten(
        "transformers",
        "transformers 2.2",
        WarmupConstantSchedule="transformers.get_constant_schedule_with_warmup",
        WarmupLinearSchedule="transformers.get_linear_schedule_with_warmup",
        WarmupCosineSchedule="transformers.get_cosine_schedule_with_warmup",
    ),
    *(
        Old(f"transformers.{place}cached_path", "transformers 4.22", "huggingface_hub.hf_hub_download")
        for place in ("", "file_utils.")
    ),
    Old(
        "transformers.AutoModelWithLMHead", "transformers 5.0", "AutoModelForCausalLM or AutoModelForMaskedLM"
    ),
    *renamed(BERT, "transformers 3.3", "BertLayerNorm LayerNorm", "torch.nn"),
    *moved(BERT, "transformers 3.3", "gelu", "torch.nn.functional"),
    *(
        Old(f"transformers.{file}", "transformers 4.0", f"{place}.{file}", f"{place}.{file}:")
        for name in MODELS.split()
        for place in (f"transformers.models.{name}",)
        for file in (f"modeling_{name}", f"tokenization_{name}", f"configuration_{name}")
    ),
)
NAMES = (*PYTHON, *NUMPY, *TORCH, *OTHERS)


mended = functools.partial(Old, mends=True)
perhaps = functools.partial(Old, mends=True, status=MAY_BREAK)

# ---- Torch ----

ASYNC = mended("async=", "Python 3.7", "non_blocking=")
NUMBER = mended("loss.data[0]", "torch 1.0", "loss.item()", error="invalid index of a 0-dim tensor")
NEXT = mended("iterator.next()", "torch 1.13", "next(iterator)", error="Iter' object has no attribute 'next'")
VIEW = perhaps("correct[:k].view(-1)", "torch 1.7", "reshape instead of view")
FROM_ONE = perhaps("1 - mask", "torch 1.2", "~mask, if it is a tensor", error="with a bool tensor is")
NEGATED = perhaps("-mask", "torch 1.2", "~mask, if it is a tensor", error="on a bool tensor is")
INVERTED = perhaps("~x.byte()", "torch 1.2", "~x.bool(), as ~1 of bytes is 254, which masks as well")
MASK = perhaps("masked_fill(x.byte(), ...)", "torch 2.1", "x.bool()", error="supports boolean masks")
LEAF = perhaps("out[:, 0::2] = value", "torch 1.8", "out.data[:, 0::2], if it is a parameter")
LABELS = perhaps(
    "torch.full(size, 1)",
    "torch 1.7",
    "1.0, if binary_cross_entropy takes it, as it makes integers",
    error="type Long .*in binary_cross_entropy",
)
CLAMP = perhaps(
    "ids.clamp_(0, size)",
    "torch 1.11",
    "ids.clamp_(0, int(size)), if they are integers",
    error="can't be cast to the desired output type",
)
LOAD = perhaps(
    "torch.load(...)",
    "torch 2.6",
    "weights_only=False, if you trust the file, which can run any code",
    error="Weights only load failed",
)
VARIABLE = perhaps("type(x) == Variable", "torch 0.4", "isinstance(x, torch.Tensor)")
PART = perhaps(
    "q *= n of x.chunk(k)", "torch 1.8 or later", "q = q * n", error="views to be modified inplace"
)
DIVISION = Old("ids / n", "torch 1.6", "ids // n, if they are integers", status=MAY_BREAK)
VERBOSE = mended("lr_scheduler(verbose=)", "torch 2.7", "scheduler.get_last_lr()")
SAMPLER = mended("Sampler.__init__(data)", "torch 2.10", "super().__init__()")
OPTIMIZER = perhaps(
    "an Optimizer without super().__init__",
    "torch 2.0",
    "super().__init__(params, {}), or no base class",
    error=r"no attribute '(defaults|_optimizer_\w+)'",
)
BETAS = mended("Adam(betas=(0, 0.9))", "torch 2.6", "0.0", error="betas must be either both floats")
RANK = mended("--local_rank", "torch 2.0", 'int(os.environ["LOCAL_RANK"]), which torchrun sets')
PORT = mended("MASTER_PORT=80000", "torch 1.10", "a port below 65536", error="from 0 to 65535 but was")
FFT = mended("torch.fft(...)", "torch 1.8", "torch.fft.fftn, which is complex")
STFT = mended("torch.stft(...)", "torch 2.0", "return_complex=True")
ONNX = Old("torch.onnx.export(...)", "torch 2.9", "dynamo=False, or install onnxscript", status=MAY_BREAK)
RETAIN = Old("retain_variables=", "torch 1.0", "retain_graph=")
FUNCTION = Old(
    "a Function without @staticmethod", "torch 1.5", "static forward(ctx, ...), backward(ctx, ...)"
)
VOLATILE = Old("volatile=", "torch 0.4", "with torch.no_grad():, as it has no effect", status=WARNS)
EARLY_STEP = Old(
    "scheduler.step() before training",
    "torch 1.1",
    "it after optimizer.step(), else the first learning rate is skipped",
    status=WARNS,
)
PRETRAINED = Old("pretrained=", "torchvision 0.13", "weights=", status=WARNS)
CUDA = Old(
    "CUDA", "a machine without CUDA", "`ampatch run --device cpu` runs it on the CPU", status=NEEDS_CUDA
)

# ---- Others ----

RANGE = mended("make_grid(range=)", "torchvision 0.14", "value_range=")
RESAMPLE = mended("rotate(resample=, fillcolor=)", "torchvision 0.14", "interpolation= and fill=")
HISTOGRAM = mended("numpy.histogram(normed=)", "NumPy 1.24", "density=")
ENCODING = mended("json.load(encoding=)", "Python 3.9", "open(path, encoding=...)")
ARCHIVES = Old(
    "config.pretrained_config_archive_map", "transformers 3.0", "a list of names", status=MAY_BREAK
)
FROM_STRING = mended("numpy.fromstring(bytes)", "NumPy 2.3", "numpy.frombuffer")
RAGGED = perhaps(
    "numpy.array(rows of several lengths)", "NumPy 1.24", "dtype=object", error="inhomogeneous shape"
)
COPY = perhaps("numpy.array(copy=False)", "NumPy 2.0", "numpy.asarray", error="Unable to avoid copy")
NUMPY_LOAD = perhaps(
    "numpy.load(...)",
    "NumPy 1.16.3",
    "allow_pickle=True, if it holds objects and you trust the file, which can run any code",
    error="allow_pickle",
)
SAMPLE = mended("random.sample(set(...), k)", "Python 3.11", "random.sample(sorted(...), k)")
LIBROSA = mended(
    "librosa.filters.mel(sr, n_fft)",
    "librosa 0.10",
    "names for all but the first argument: sr=sr, n_fft=n_fft",
)
COLORS = perhaps(
    'prop_cycle.by_key()["color"]',
    "matplotlib 3.11",
    "matplotlib.colors.to_hex(color)",
    error=r"int\(\) can't convert non-string with explicit base",
)
YAML = mended("yaml.load(file)", "PyYAML 6", "yaml.safe_load")

# In the order in which `ampatch check` shows them.
PATTERNS = (
    *(ASYNC, NUMBER, NEXT, VIEW, FROM_ONE, NEGATED, INVERTED, MASK),
    *(LEAF, LABELS, CLAMP, LOAD, VARIABLE, PART, DIVISION),
    *(FROM_STRING, HISTOGRAM, RAGGED, COPY, NUMPY_LOAD, SAMPLE, ENCODING, LIBROSA, COLORS, RANGE, RESAMPLE),
    *(ARCHIVES, VERBOSE, SAMPLER, OPTIMIZER, BETAS, RANK, PORT),
    *(FFT, STFT, ONNX, RETAIN, FUNCTION, YAML, VOLATILE, EARLY_STEP, PRETRAINED, CUDA),
)
