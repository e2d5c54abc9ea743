"""What scripts of earlier years say in other ways than by a name that is gone, and what to write."""

from __future__ import annotations

import functools

from ampatch.apex.legacy.old import MAY_BREAK, NEEDS_CUDA, WARNS, Old

RAGGED, COPY = "numpy.array(rows of several lengths)", "numpy.array(copy=False)"
LOAD, NUMPY_LOAD = "torch.load(...)", "numpy.load(...)"
ASYNC = "async="
PART = "q *= n of x.chunk(k)"
MASK = "masked_fill(x.byte(), ...)"
INVERTED = "~x.byte()"
COLORS = 'prop_cycle.by_key()["color"]'
CLAMP = "ids.clamp_(0, size)"
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
    mended(INVERTED, "torch 1.2", "~x.bool(), as ~1 of bytes is 254, which masks as well", None, MAY_BREAK),
    mended(MASK, "torch 2.1", "x.bool()", None, MAY_BREAK, error="supports boolean masks"),
    mended(
        CLAMP,
        "torch 1.11",
        "ids.clamp_(0, int(size)), if they are integers",
        status=MAY_BREAK,
        error="can't be cast to the desired output type",
    ),
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
    mended(
        COLORS,
        "matplotlib 3.11",
        "matplotlib.colors.to_hex(color)",
        status=MAY_BREAK,
        error="int() can't convert non-string with explicit base",
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
