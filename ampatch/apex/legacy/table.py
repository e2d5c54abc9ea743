"""What breaks in scripts of earlier years: what they say, since when, and what to write. A line a row."""

from __future__ import annotations

import collections.abc
import functools
from dataclasses import dataclass

BREAKS, MAY_BREAK, WARNS, NEEDS_CUDA = "BREAKS", "may break", "warns", "needs CUDA"
OURS, SIX = "ampatch.apex.legacy.functions", "ampatch.apex.legacy.torch_six"


@dataclass(frozen=True, slots=True)
class Old:
    """One thing that scripts say: a dotted name, or a pattern of code that finding.py knows by this name.

    `since` is the first version that does not take it, and may say until which. `new` is the dotted name
    of what `ampatch run --legacy` puts in the place of a name; `mends` says that it mends the pattern.
    `error` are words of the error, for what dies in lines that do not show it.
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
        """Whether `ampatch run --legacy` mends it."""
        return self.mends or self.new is not None

    @property
    def advice(self) -> str:
        """Since when it breaks, what to write, and whether it can run as it is."""
        if self.status == NEEDS_CUDA:
            return self.remedy
        mended = "; `ampatch run --legacy` mends it" if self.is_mended else ""
        return f"since {self.since}: use {self.remedy}{mended}"


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
            *(("alltrue", "all"), ("round_", "round"), ("mat", "asmatrix")),
        )
    ),
    Old("numpy.NINF", "NumPy 2.0", "-numpy.inf"),
    Old("numpy.trapz", "NumPy 2.4", "numpy.trapezoid", "numpy.trapezoid"),
    Old("numpy.in1d", "NumPy 2.4", "numpy.isin", f"{OURS}.in1d"),
    Old("numpy.asscalar", "NumPy 1.23", "array.item()", f"{OURS}.asscalar"),
    Old("numpy.math", "NumPy 2.0", "math", "math"),
)
TORCH = (
    Old("torch._six", "torch 2.0", "str, int, math.inf and collections.abc", SIX),
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
    Old("torch.ifft", "torch 1.8", "torch.fft.ifftn, which takes complex numbers"),
    Old("torch.legacy", "torch 1.0", "torch.nn"),
    Old("torch.utils.ffi", "torch 1.0", "torch.utils.cpp_extension"),
    Old("torch.utils.serialization.load_lua", "torch 1.0", "a converted file"),
    Old("torch.utils.data.dataloader._use_shared_memory", "torch 1.1", "torch.utils.data.get_worker_info"),
    Old("torch.utils.data.dataloader._DataLoaderIter", "torch 1.2", "iter(loader)"),
    Old("torch.utils.data.dataloader.string_classes", "torch 2.0", "str", f"{SIX}.string_classes"),
    Old("torch.utils.data.dataloader.numpy_type_map", "torch 1.1", "torch.utils.data.default_collate"),
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
    Old("sklearn.externals.joblib", "scikit-learn 0.23", "joblib"),
    Old("sklearn.externals.six", "scikit-learn 0.23", "six"),
    Old("sklearn.cross_validation", "scikit-learn 0.20", "sklearn.model_selection"),
    Old("sklearn.datasets.fetch_mldata", "scikit-learn 0.22", "sklearn.datasets.fetch_openml"),
    Old("torchvision.transforms.Scale", "torchvision 0.12", "torchvision.transforms.Resize"),
    Old("torchvision.transforms.RandomSizedCrop", "torchvision 0.12", "RandomResizedCrop, of the same place"),
    Old("torchvision.models.utils", "torchvision 0.11", "torch.hub.load_state_dict_from_url"),
)
NAMES = (*PYTHON, *NUMPY, *TORCH, *OTHERS)

LOAD = "torch.load(...)"
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
    Old("-mask", "torch 1.2", "~mask, if it is a tensor", status=MAY_BREAK),
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
    Old("array.tostring()", "NumPy 2.3", "array.tobytes()"),
    Old("random.sample(set(...), k)", "Python 3.11", "random.sample(sorted(...), k)"),
    mended("lr_scheduler(verbose=)", "torch 2.7", "scheduler.get_last_lr()"),
    mended("Sampler.__init__(data)", "torch 2.10", "super().__init__()"),
    mended("Adam(betas=(0, 0.9))", "torch 2.6", "0.0", error="betas must be either both floats"),
    mended("--local_rank", "torch 2.0", 'int(os.environ["LOCAL_RANK"]), which torchrun sets'),
    Old("torch.fft(...)", "torch 1.8", "torch.fft.fftn, which is complex"),
    Old("torch.stft(...)", "torch 2.0", "return_complex=True"),
    Old("retain_variables=", "torch 1.0", "retain_graph="),
    Old("a Function without @staticmethod", "torch 1.5", "static forward(ctx, ...), backward(ctx, ...)"),
    Old("yaml.load(file)", "PyYAML 6", "yaml.safe_load"),
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
