"""Finds the metric that a script prints at its end, and does not report."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ampatch.sweeps.verdicts.metric_names import HELD_OUT, of_words, words

# Names that scripts print beside a number; those at the end of the list say less than the ones before.
METRICS = of_words("""
    accuracy acc acc1 acc5 ap top1 top5 f1 auc auroc auprc bleu chrf rouge meteor cider map miou iou dice
    recall precision psnr ssim perplexity ppl wer cer mae mse rmse mape nll fid ndcg mrr hits mcc r2 kappa em
    spearman pearson elbo bpc bpd eer lpips epe pesq sdr
""")
VAGUE = of_words("error err score reward loss losses")
IN_FULL = {"acc": "accuracy", "acc1": "top1", "acc5": "top5", "ppl": "perplexity", "err": "error"}
# A number that is no part of a word, as the digits of top5, mAP@0.5 and AP50 are.
NUMBER = re.compile(r"(?<![\w.@-])[-+]?(\d|\.\d)")
EDGES = " -.:,;|*({[]})%/0123456789'\""
LONGEST = 50


def find_printed(lines: Sequence[str]) -> tuple[str, ...]:
    """Returns the metric that the last of these lines to have one shows, and the words; nothing without one.

    >>> find_printed(["epoch 3 loss 0.41", "Test loss: 0.3, acc: 93.1%", "saved to model.pt"])
    ('accuracy', 'acc: 93.1%')
    """
    return next((found for line in reversed(lines) if (found := find_in(line))), ())


def find_in(line: str) -> tuple[str, ...]:
    """Returns the metric of a line that says most: no loss, where there is another, and on held-out data."""
    found, start = [], 0
    for number in NUMBER.finditer(line):
        before = line[start : number.start()]
        if name := name_in(before):
            text = line[start:].lstrip(EDGES)[:LONGEST].rstrip()
            found.append((name.endswith("loss"), not is_held_out(before), name, text))
        start = number.start()
    return min(found, key=lambda it: it[:2])[2:] if found else ()


def name_in(text: str) -> str:
    """Returns the name of the metric whose number follows a text; empty if it is none.

    A loss is one if it is that of held-out data: that of training is compared anyway.
    """
    names = [name.lower() for name in re.findall(r"[^\W\d_][^\W_]*(?:@\d+)?", text)]
    names += [re.sub(r"@?\d*$", "", name) for name in names] + words(text)
    name = next((it for known in (METRICS, VAGUE) for it in names if it.replace("@", "") in known), "")
    name = name.replace("@", "")
    if name.startswith("loss"):
        return "_".join([*(it for it in words(text) if it in HELD_OUT), "loss"]) if is_held_out(text) else ""
    return IN_FULL.get(name, name)


def is_held_out(text: str) -> bool:
    """Says whether a text is about data that is not trained on."""
    return bool(HELD_OUT & set(words(text)))
