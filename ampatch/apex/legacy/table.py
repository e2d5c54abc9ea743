"""What breaks in scripts of earlier years: what they say, since when, and what to write. A line a row."""

from __future__ import annotations

import collections.abc
import functools

from ampatch.apex.legacy.gone.model_urls import FILES
from ampatch.apex.legacy.old import MAY_BREAK, NEEDS_CUDA, WARNS, Old

LEGACY = "ampatch.apex.legacy.gone"
OURS, SIX = f"{LEGACY}.functions", f"{LEGACY}.torch_six"
CANVAS = "matplotlib.backends.backend_agg.FigureCanvasAgg"

PYTHON = (
    *(
        Old(f"collections.{name}", "Python 3.10", f"collections.abc.{name}", f"collections.abc.{name}")
        for name in sorted({*collections.abc.__all__} - {"Buffer"})  # which came later
    ),
    Old("time.clock", "Python 3.8", "time.perf_counter", "time.perf_counter"),
    Old("fractions.gcd", "Python 3.9", "math.gcd", "math.gcd"),
    Old("inspect.getargspec", "Python 3.11", "inspect.getfullargspec", f"{OURS}.getargspec"),
    Old("base64.encodestring", "Python 3.9", "base64.encodebytes", "base64.encodebytes"),
    Old("base64.decodestring", "Python 3.9", "base64.decodebytes", "base64.decodebytes"),
    Old("os.errno", "Python 3.7", "errno", "errno:"),
    Old("cgi.escape", "Python 3.8", "html.escape", "html.escape"),
    Old("threading.Thread.isAlive", "Python 3.9", "is_alive", "threading.Thread.is_alive"),
    Old("imp", "Python 3.12", "importlib"),
    Old("distutils", "Python 3.12", "packaging.version, or setuptools, which brings it back"),
)
NUMPY = (
    *(
        Old(f"numpy.{name}", "NumPy 1.24", name, f"builtins.{name}")
        for name in ("float", "int", "object", "str", "complex")
    ),
    Old("numpy.unicode", "NumPy 1.24", "str", "builtins.str"),
    *(
        Old(f"numpy.{name}", "NumPy 1.24, until 2.0", new, f"builtins.{new}")
        for name, new in (("bool", "bool"), ("long", "int"))
    ),
    *(
        Old(f"numpy.{old}", "NumPy 2.0", f"numpy.{new}", f"numpy.{new}")
        for old, new in (
            *(("float_", "float64"), ("complex_", "complex128"), ("unicode_", "str_"), ("string_", "bytes_")),
            *(("Inf", "inf"), ("Infinity", "inf"), ("infty", "inf"), ("PINF", "inf"), ("NaN", "nan")),
            *(("NAN", "nan"), ("product", "prod"), ("cumproduct", "cumprod"), ("sometrue", "any")),
            *(("alltrue", "all"), ("round_", "round"), ("mat", "asmatrix"), ("bool8", "bool_")),
            *(("int0", "intp"), ("uint0", "uintp"), ("object0", "object_"), ("str0", "str_")),
            *(("bytes0", "bytes_"), ("cfloat", "complex128"), ("singlecomplex", "complex64")),
            *(("longfloat", "longdouble"), ("issubsctype", "issubdtype")),
            *(
                (name, f"exceptions.{name}")
                for name in ("VisibleDeprecationWarning", "ComplexWarning", "RankWarning", "AxisError")
            ),
        )
    ),
    *(
        Old(f"numpy.{name}", "NumPy 2.0", remedy, f"{OURS}.{name}")
        for name, remedy in (
            *(
                ("NINF", "-numpy.inf"),
                ("PZERO", "0.0"),
                ("NZERO", "-0.0"),
                ("msort", "numpy.sort(a, axis=0)"),
            ),
            *(("asfarray", "numpy.asarray(a, dtype=float)"), ("cast", "numpy.asarray(a, dtype)")),
            ("find_common_type", "numpy.result_type"),
        )
    ),
    Old("numpy.warnings", "NumPy 1.25", "warnings", "warnings:"),
    Old("numpy.linalg.linalg", "NumPy 2.4", "numpy.linalg", "numpy.linalg:"),
    Old("numpy.alen", "NumPy 1.23", "len", "builtins.len"),
    Old("numpy.rank", "NumPy 1.18", "numpy.ndim", "numpy.ndim"),
    Old("numpy.typeDict", "NumPy 1.25", "numpy.sctypeDict", "numpy.sctypeDict"),
    *(
        Old(f"numpy.ndarray.{name}", f"NumPy {since}", remedy, f"{OURS}.{name}")
        for name, since, remedy in (
            ("ptp", "2.0", "numpy.ptp(array)"),
            ("itemset", "2.0", "array[index] = value"),
            ("newbyteorder", "2.0", "array.view(array.dtype.newbyteorder(order))"),
            ("tostring", "2.3", "array.tobytes()"),
        )
    ),
    Old("numpy.trapz", "NumPy 2.4", "numpy.trapezoid", "numpy.trapezoid"),
    Old("numpy.in1d", "NumPy 2.4", "numpy.isin", f"{OURS}.in1d"),
    Old("numpy.asscalar", "NumPy 1.23", "array.item()", f"{OURS}.asscalar"),
    Old("numpy.math", "NumPy 2.0", "math", "math:"),
)
TORCH = (
    Old("torch._six", "torch 2.0", "str, int, math.inf and collections.abc", f"{SIX}:"),
    Old("torch.symeig", "torch 2.0", "torch.linalg.eigh", f"{OURS}.symeig"),
    Old("torch.eig", "torch 1.13", "torch.linalg.eig, which is complex"),
    Old("torch.solve", "torch 1.12", "torch.linalg.solve, arguments the other way round", f"{OURS}.solve"),
    Old("torch.gesv", "torch 1.2", "torch.linalg.solve, arguments the other way round", f"{OURS}.solve"),
    Old("torch.lstsq", "torch 1.13", "torch.linalg.lstsq, arguments the other way round"),
    Old("torch.gels", "torch 1.3", "torch.linalg.lstsq, arguments the other way round"),
    Old("torch.matrix_rank", "torch 1.13", "torch.linalg.matrix_rank", "torch.linalg.matrix_rank"),
    Old("torch.potrf", "torch 1.2", "torch.linalg.cholesky"),
    Old("torch.potrs", "torch 1.2", "torch.cholesky_solve"),
    Old("torch.trtrs", "torch 1.2", "torch.linalg.solve_triangular"),
    Old("torch.btrifact", "torch 1.2", "torch.linalg.lu_factor"),
    Old("torch.btrisolve", "torch 1.2", "torch.linalg.lu_solve"),
    Old("torch.rfft", "torch 1.8", "torch.fft.rfftn, which is complex", f"{OURS}.rfft"),
    Old("torch.irfft", "torch 1.8", "torch.fft.irfftn, which takes complex numbers", f"{OURS}.irfft"),
    Old("torch.ifft", "torch 1.8", "torch.fft.ifftn, which takes complex numbers", f"{OURS}.ifft"),
    Old("torch.legacy", "torch 1.0", "torch.nn"),
    Old("torch.utils.ffi", "torch 1.0", "torch.utils.cpp_extension"),
    Old("torch.utils.serialization.load_lua", "torch 1.0", "a converted file"),
    Old("torch._utils._accumulate", "torch 2.3", "itertools.accumulate", "itertools.accumulate"),
    *(
        Old(f"torch.utils.data.dataloader.{name}", f"torch {since}", remedy, f"{OURS}.{name}")
        for name, since, remedy in (
            ("_use_shared_memory", "1.1", "torch.utils.data.get_worker_info"),
            ("_DataLoaderIter", "1.2", "iter(loader)"),
            ("numpy_type_map", "1.1", "torch.utils.data.default_collate"),
        )
    ),
    *(
        Old(f"{place}.{name}", since, remedy, f"{SIX}.{name}")
        for place, since in (
            ("torch.utils.data.dataloader", "torch 1.5"),
            ("torch.utils.data._utils.collate", "torch 2.0"),
        )
        for name, remedy in (
            ("string_classes", "str"),
            ("int_classes", "int"),
            ("container_abcs", "collections.abc"),
        )
    ),
    Old("torch.nn.modules.linear._LinearWithBias", "torch 1.9", "torch.nn.Linear", "torch.nn.Linear"),
    Old("torch.distributed.launch", "torch 1.9", "torchrun, which sets LOCAL_RANK", status=WARNS),
    Old("torch.cuda.amp.GradScaler", "torch 2.4", 'torch.amp.GradScaler("cuda")', status=WARNS),
    Old("torch.cuda.amp.autocast", "torch 2.4", 'torch.autocast("cuda")', status=WARNS),
)
OTHERS = (
    *(
        Old(f"PIL.Image.{old}", "Pillow 10", f"PIL.Image.{new}", f"PIL.Image.{new}")
        for old, new in (("ANTIALIAS", "LANCZOS"), ("LINEAR", "BILINEAR"), ("CUBIC", "BICUBIC"))
    ),
    Old("PIL.PILLOW_VERSION", "Pillow 9", "PIL.__version__", "PIL.__version__"),
    *(Old(f"scipy.misc.{name}", "SciPy 1.3", f"imageio.{name}") for name in ("imread", "imsave")),
    Old("scipy.misc.imresize", "SciPy 1.3", "PIL.Image.Image.resize"),
    Old("scipy.misc.logsumexp", "SciPy 1.3", "scipy.special.logsumexp"),
    *(
        Old(f"PIL.{place}", "Pillow 10", remedy, f"{OURS}.{place.rpartition('.')[2]}")
        for place, remedy in (
            ("ImageDraw.ImageDraw.textsize", "draw.textbbox((0, 0), text)"),
            ("ImageFont.FreeTypeFont.getsize", "font.getbbox(text)"),
        )
    ),
    *(
        Old(
            f"scipy.signal.{name}",
            "SciPy 1.13",
            f"scipy.signal.windows.{name}",
            f"scipy.signal.windows.{name}",
        )
        for name in ("gaussian", "hann", "hamming", "blackman", "kaiser", "tukey", "triang", "boxcar")
    ),
    *(
        Old(f"scipy.integrate.{old}", "SciPy 1.14", f"scipy.integrate.{new}", f"scipy.integrate.{new}")
        for old, new in (("trapz", "trapezoid"), ("simps", "simpson"), ("cumtrapz", "cumulative_trapezoid"))
    ),
    Old("scipy.interp", "SciPy 1.12", "numpy.interp", "numpy.interp"),
    *(
        Old(f"skimage.measure.{old}", "scikit-image 0.18", f"skimage.metrics.{new}", f"skimage.metrics.{new}")
        for old, new in (
            *(("compare_psnr", "peak_signal_noise_ratio"), ("compare_mse", "mean_squared_error")),
            ("compare_nrmse", "normalized_root_mse"),
        )
    ),
    Old(
        "skimage.measure.compare_ssim",
        "scikit-image 0.18",
        "skimage.metrics.structural_similarity",
        f"{OURS}.compare_ssim",
    ),
    Old(f"{CANVAS}.tostring_rgb", "matplotlib 3.10", "canvas.buffer_rgba()", f"{OURS}.tostring_rgb"),
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
    *(
        Old(
            f"torchvision.transforms.{old}",
            "torchvision 0.12",
            f"{new}, of the same place",
            f"torchvision.transforms.{new}",
        )
        for old, new in (("Scale", "Resize"), ("RandomSizedCrop", "RandomResizedCrop"))
    ),
    Old("torchvision.models.utils", "torchvision 0.11", "torch.hub.load_state_dict_from_url", "torch.hub:"),
    Old(
        "torchvision.transforms.functional_tensor",
        "torchvision 0.17",
        "torchvision.transforms.functional",
        "torchvision.transforms._functional_tensor:",
    ),
    *(
        Old(
            f"torchvision.models.{name}.model_urls",
            "torchvision 0.15",
            "weights=",
            f"{LEGACY}.model_urls.{name}",
        )
        for name in FILES
    ),
    *(
        Old(f"transformers.{place}AdamW", "transformers 4.50", "torch.optim.AdamW", f"{OURS}.AdamW")
        for place in ("", "optimization.")
    ),
    *(
        Old(
            f"transformers.{kind}_{name}",
            "transformers 4.0",
            f"transformers.models.{name}.{kind}_{name}",
            f"transformers.models.{name}.{kind}_{name}:",
        )
        for name in ("bert", "roberta", "distilbert", "xlnet", "gpt2", "albert", "electra", "bart", "t5")
        for kind in ("modeling", "tokenization", "configuration")
    ),
)
NAMES = (*PYTHON, *NUMPY, *TORCH, *OTHERS)

RAGGED, COPY = "numpy.array(rows of several lengths)", "numpy.array(copy=False)"
LOAD, NUMPY_LOAD = "torch.load(...)", "numpy.load(...)"
ASYNC = "async="
PART = "q *= n of x.chunk(k)"
mended = functools.partial(Old, mends=True)
PATTERNS = (
    mended(ASYNC, "Python 3.7", "non_blocking="),
    mended("loss.data[0]", "torch 1.0", "loss.item()", error="invalid index of a 0-dim tensor"),
    mended("iterator.next()", "torch 1.13", "next(iterator)", error="Iter' object has no attribute 'next'"),
    mended("correct[:k].view(-1)", "torch 1.7", "reshape instead of view", status=MAY_BREAK),
    mended(
        "1 - mask", "torch 1.2", "~mask, if it is a tensor", None, MAY_BREAK, error="with a bool tensor is"
    ),
    mended("-mask", "torch 1.2", "~mask, if it is a tensor", None, MAY_BREAK, error="on a bool tensor is"),
    mended("masked_fill(x.byte(), ...)", "torch 2.1", "x.bool()", error="supports boolean masks"),
    mended(
        LOAD,
        "torch 2.6",
        "weights_only=False, if you trust the file, which can run any code",
        status=MAY_BREAK,
        error="Weights only load failed",
    ),
    mended("type(x) == Variable", "torch 0.4", "isinstance(x, torch.Tensor)", status=MAY_BREAK),
    mended(PART, "torch 1.8 or later", "q = q * n", None, MAY_BREAK, error="views to be modified inplace"),
    Old("ids / n", "torch 1.6", "ids // n, if they are integers", status=MAY_BREAK),
    mended("numpy.fromstring(bytes)", "NumPy 2.3", "numpy.frombuffer"),
    mended(
        RAGGED,
        "NumPy 1.24",
        "dtype=object",
        status=MAY_BREAK,
        error="inhomogeneous shape",
    ),
    mended(COPY, "NumPy 2.0", "numpy.asarray", None, MAY_BREAK, error="Unable to avoid copy"),
    mended(
        NUMPY_LOAD,
        "NumPy 1.16.3",
        "allow_pickle=True, if it holds objects and you trust the file, which can run any code",
        status=MAY_BREAK,
        error="allow_pickle",
    ),
    mended("random.sample(set(...), k)", "Python 3.11", "random.sample(sorted(...), k)"),
    mended(
        "librosa.filters.mel(sr, n_fft)",
        "librosa 0.10",
        "names for all but the first argument: sr=sr, n_fft=n_fft",
    ),
    mended("lr_scheduler(verbose=)", "torch 2.7", "scheduler.get_last_lr()"),
    mended("Sampler.__init__(data)", "torch 2.10", "super().__init__()"),
    mended("Adam(betas=(0, 0.9))", "torch 2.6", "0.0", error="betas must be either both floats"),
    mended("--local_rank", "torch 2.0", 'int(os.environ["LOCAL_RANK"]), which torchrun sets'),
    mended("MASTER_PORT=80000", "torch 1.10", "a port below 65536", error="from 0 to 65535 but was"),
    mended("torch.fft(...)", "torch 1.8", "torch.fft.fftn, which is complex"),
    mended("torch.stft(...)", "torch 2.0", "return_complex=True"),
    Old("retain_variables=", "torch 1.0", "retain_graph="),
    Old("a Function without @staticmethod", "torch 1.5", "static forward(ctx, ...), backward(ctx, ...)"),
    mended("yaml.load(file)", "PyYAML 6", "yaml.safe_load"),
    Old("volatile=", "torch 0.4", "with torch.no_grad():, as it has no effect", status=WARNS),
    Old(
        "scheduler.step() before training",
        "torch 1.1",
        "it after optimizer.step(), else the first learning rate is skipped",
        status=WARNS,
    ),
    Old("pretrained=", "torchvision 0.13", "weights=", status=WARNS),
    Old("CUDA", "a machine without CUDA", "`ampatch run --device cpu` runs it on the CPU", status=NEEDS_CUDA),
)
