"""What the names of metrics say: which way is better, and which tell nothing about accuracy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def of_words(text: str) -> frozenset[str]:
    """Returns the words of a text as a set."""
    return frozenset(text.split())


LOWER_IS_BETTER = of_words("""
    mae mape smape msle rmsle mase rmsd medae mre wer cer ter der eer fid kid lpips bpc bpd bpb bits ce bce
    xent kl kld jsd mmd divergence ece brier crps fpr fnr fdr frr false miss misses misclassified
    misclassification mistakes regret cost distance dist distortion discrepancy residual huber chamfer
    wasserstein emd hausdorff epe mpjpe ade fde mcd time ms sec secs second seconds minutes hours latency
    elapsed
""")
# Written together with what they are of: logloss, valerror, nrmse, crossentropy.
LOWER_ENDINGS = ("loss", "losses", "err", "error", "errors", "mse", "nll", "ppl", "perplexity", "entropy")
NO_ENDINGS = of_words("terror floss gloss")
# scikit-learn's neg_mean_squared_error is an error turned round, and a negative log likelihood is a
# likelihood turned round; a true negative rate is neither.
NEGATIONS = of_words("neg negative")
TURNED_ROUND = of_words("log likelihood elbo score reward accuracy acc")

# Numbers that say where a run was, how fast, or how it was set: levels may differ in them and be as accurate.
NO_ACCURACY = of_words("""
    step steps epoch epochs iteration iterations iter iters batch batches sample samples token tokens image
    images seed lr learning momentum scale scaler norm time ms sec secs second seconds minute minutes hour
    hours latency elapsed throughput speed fps memory mem mib mb gib gb bytes
""")
FILLERS = of_words("""
    global local train training val valid validation test eval total num number count current last per a of in
    and seen rate group loss grad gradient gradients gpu cuda cpu peak max mean avg average
""")
HELD_OUT = of_words("test val valid validation eval dev")
ACCURACY = of_words("accuracy acc")


def words(name: str) -> list[str]:
    """Splits a name at case, digits and whatever is no letter.

    >>> words("val/MSELoss_top5"), words("testAccuracy")
    (['val', 'mse', 'loss', 'top', '5'], ['test', 'accuracy'])
    """
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def is_lower_better(name: str) -> bool:
    """Says whether less of a metric is better, by the words of its name; where none is known, more is.

    >>> [is_lower_better(name) for name in ("valLoss", "top5_err", "neg_log_likelihood", "hd95")]
    [True, True, True, True]
    >>> [is_lower_better(name) for name in ("accuracy", "lossless", "neg_mean_squared_error")]
    [False, False, False]
    """
    found = words(name)
    # hd95 is the usual Hausdorff distance; hd alone says too little.
    return any(map(means_less, found)) != is_turned_round(found) or "hd95" in name.lower()


def means_less(word: str) -> bool:
    """Says whether less is better of what a word means."""
    return word in LOWER_IS_BETTER or (word.endswith(LOWER_ENDINGS) and word not in NO_ENDINGS)


def is_turned_round(found: Sequence[str]) -> bool:
    """Says whether a name is that of something negated, so that its other direction is better."""
    starts = [index for index, word in enumerate(found) if word in NEGATIONS]
    return any(word in TURNED_ROUND or means_less(word) for start in starts for word in found[start + 1 :])


def is_about_accuracy(name: str) -> bool:
    """Says whether a metric can tell how well a run went: not if it counts steps, seconds or the like.

    >>> [is_about_accuracy(name) for name in ("accuracy", "loss_epoch", "top1", "inception_score")]
    [True, True, True, True]
    >>> [is_about_accuracy(name) for name in ("epoch", "lr/group0", "samples_per_second", "loss_scale")]
    [False, False, False, False]
    """
    found = {word for word in words(name) if not word.isdigit()}
    if "loss" in found and not found & {"scale", "scaler"}:
        return True
    return not found & NO_ACCURACY or not found <= NO_ACCURACY | FILLERS


def most_important(names: Iterable[str]) -> str | None:
    """Returns the metric to show where there is room for one: an accuracy, if there, on held-out data.

    >>> most_important(["f1", "train_accuracy", "test_accuracy"]), most_important(["f1", "bleu"])
    ('test_accuracy', 'f1')
    """

    def rank(name: str) -> tuple[bool, bool, bool]:
        found = set(words(name))
        return name.lower() != "accuracy", not found & ACCURACY, not found & HELD_OUT

    return min(names, key=rank, default=None)
