"""What scripts of earlier years say in other ways than by a name that is gone, and what to write."""

from __future__ import annotations

import functools

from ampatch.apex.legacy.old import MAY_BREAK, NEEDS_CUDA, WARNS, Old

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
BETAS = mended("Adam(betas=(0, 0.9))", "torch 2.6", "0.0", error="betas must be either both floats")
RANK = mended("--local_rank", "torch 2.0", 'int(os.environ["LOCAL_RANK"]), which torchrun sets')
PORT = mended("MASTER_PORT=80000", "torch 1.10", "a port below 65536", error="from 0 to 65535 but was")
FFT = mended("torch.fft(...)", "torch 1.8", "torch.fft.fftn, which is complex")
STFT = mended("torch.stft(...)", "torch 2.0", "return_complex=True")
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
    error="int() can't convert non-string with explicit base",
)
YAML = mended("yaml.load(file)", "PyYAML 6", "yaml.safe_load")

# In the order in which `ampatch check` shows them.
PATTERNS = (
    *(ASYNC, NUMBER, NEXT, VIEW, FROM_ONE, NEGATED, INVERTED, MASK, CLAMP, LOAD, VARIABLE, PART, DIVISION),
    *(FROM_STRING, RAGGED, COPY, NUMPY_LOAD, SAMPLE, LIBROSA, COLORS, VERBOSE, SAMPLER, BETAS, RANK, PORT),
    *(FFT, STFT, RETAIN, FUNCTION, YAML, VOLATILE, EARLY_STEP, PRETRAINED, CUDA),
)
