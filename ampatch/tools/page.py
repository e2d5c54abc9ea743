"""Makes a page that opens anywhere, with no network, no script and no file beside it, out of templates."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Callable
from pathlib import Path, PurePath

from ampatch.tools import numbers
from ampatch.tools.log_file import ESCAPES

HERE = Path(__file__).parent
NO_CHARTS = "There are no charts, since NumPy is not installed: pip install numpy"
# What XML and HTML do not allow, not even escaped; a tab and the ends of lines stay.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]")
# Long names may break after these.
JOINTS = re.compile(r"(?<=\w[_/\\=.,:-])(?=\w)")
logger = logging.getLogger("ampatch")


def draw_charts(page: str, module: str, *given: object) -> list | None:
    """Returns the charts that a module draws of something; None without NumPy, which the log says."""
    if importlib.util.find_spec("numpy") is None:
        logger.warning("%s: %s", page, NO_CHARTS)
        return None
    return importlib.import_module(module).charts_of(*given)


def render(folder: Path, script: str, charts: list | None, **values: object) -> str:
    """Returns the page of a folder, `page.html.j2`, which takes nothing as markup that is not."""
    # torch depends on jinja2. Imported here, it makes nobody wait who wants no page.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    pages = Environment(
        loader=FileSystemLoader([folder, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=clean,
    )
    pages.filters.update(breakable=breakable)
    values |= {"script": PurePath(script).name or script, "charts": charts, "no_charts": NO_CHARTS}
    return pages.get_template("page.html.j2").render(n=TypesetNumbers(), **values)


class TypesetNumbers:
    """The functions of `numbers`, as pages print what they write."""

    nothing = numbers.typeset(numbers.NOTHING)

    def __getattr__(self, name: str) -> Callable[..., str]:
        return lambda *values: numbers.typeset(getattr(numbers, name)(*values))


def clean(value: object) -> object:
    r"""Returns text without what a page cannot hold.

    >>> clean("<b>\x1b[31m\x00\udcff")
    '<b>\ufffd?'
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):  # which is markup already
        return value
    # Names of files may hold lone surrogates, which cannot be written as UTF-8.
    return CONTROL.sub("\ufffd", ESCAPES.sub("", value).encode("utf-8", "replace").decode("utf-8"))


def breakable(name: str) -> str:
    """Returns a name as markup that may break after a joint.

    >>> print(breakable("top5_a<b>"))
    top5_<wbr>a&lt;b&gt;
    """
    from markupsafe import Markup

    return Markup("<wbr>").join(JOINTS.split(str(clean(name))))
