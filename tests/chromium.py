"""Opens pages in a real browser without a window, and reads what it made of them."""

import html
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAME = "chromium"
SECONDS = 120
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",  # what a page says in the console
)
DARK = "--blink-settings=preferredColorScheme=0"

needs_chromium = pytest.mark.skipif(
    shutil.which(NAME) is None, reason=f"needs a browser: there is no {NAME!r} on PATH"
)

# Puts each page into a frame of each width, and measures it there as a reader would see it.
HARNESS = """<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<style>iframe{border:0;display:block;height:800px}</style>
<script type="application/json" id="pages">PAGES</script>
<pre id="result"></pre><script>
const visible = (it) => it.getClientRects().length && getComputedStyle(it).visibility === "visible";
const box = (it) => it.getBoundingClientRect();
const name = (it) => it.tagName + "." + it.getAttribute("class") + ": " + it.textContent.slice(0, 40);
function background(it) {
  for (; it; it = it.parentElement) {
    const color = getComputedStyle(it).backgroundColor;
    if (color !== "rgba(0, 0, 0, 0)") return color;
  }
  return "none";
}
function texts(page) {
  const walk = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT), found = [];
  for (let node; (node = walk.nextNode());) {
    const it = node.parentElement;
    if (node.data.trim() && visible(it) && !["title", "desc"].includes(it.tagName)) found.push(it);
  }
  return found;
}
function colours(found) {
  const pairs = new Map();
  for (const it of found) {
    const style = getComputedStyle(it), colour = it.tagName === "text" ? style.fill : style.color;
    pairs.set(colour + background(it), [colour, background(it), name(it)]);
  }
  return [...pairs.values()];
}
function crossing(svg) {
  const labels = [...svg.querySelectorAll("text")], found = [];
  labels.forEach((a, i) => labels.slice(i + 1).forEach((b) => {
    const p = box(a), q = box(b);
    const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (wide > 1 && high > 5) found.push(a.textContent + " | " + b.textContent);
  }));
  return found;
}
function measure(frame) {
  const view = frame.contentWindow, page = frame.contentDocument, width = page.documentElement.clientWidth;
  const shown = texts(page), inDrawings = [...page.querySelectorAll("svg text")].filter(visible);
  const cut = inDrawings.filter((it) => {
    const whole = box(it.ownerSVGElement), own = box(it);
    return own.left < whole.left - 2 || own.right > whole.right + 2 || own.bottom > whole.bottom + 2;
  });
  const sizes = inDrawings.map((it) => parseFloat(view.getComputedStyle(it).fontSize)
    * box(it.ownerSVGElement).width / it.ownerSVGElement.viewBox.baseVal.width);
  return {
    scroll: page.documentElement.scrollWidth, width,
    outside: [...page.body.querySelectorAll("*")].filter((it) => visible(it)
      && !it.closest("thead") && box(it).right > width + 1).map(name),
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
    loaded: view.performance.getEntriesByType("resource").map((it) => it.name),
    smallest: Math.min(100, ...sizes), cut: cut.map(name),
    crossing: [...page.querySelectorAll("svg[role=img]")].flatMap(crossing),
    heads: [...page.querySelectorAll("table[role=table]")].map((it) => view.getComputedStyle(it).display),
    colours: colours(shown),
  };
}
const pages = JSON.parse(document.getElementById("pages").textContent), frames = [];
for (const [page, html] of Object.entries(pages.html)) for (const width of pages.widths) {
  const frame = document.createElement("iframe");
  frame.width = width;
  frame.srcdoc = html;
  frames.push([page + " at " + width, frame]);
  document.body.append(frame);
}
addEventListener("load", () => {
  const result = Object.fromEntries(frames.map(([key, frame]) => [key, measure(frame)]));
  document.getElementById("result").textContent = JSON.stringify(result);
});
</script>"""


def luminance(colour: str) -> float:
    """Returns the relative luminance of "#rrggbb" or "rgb(r, g, b)", by IEC 61966-2-1 (sRGB)."""
    if colour.startswith("#"):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    else:
        parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(a * b for a, b in zip((0.2126729, 0.7151522, 0.0721750), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of WCAG 2.2."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def start(arguments: list[str], folder: Path) -> subprocess.CompletedProcess:
    """Starts a browser that knows nothing, and waits for its end."""
    profile = tempfile.mkdtemp(dir=folder)
    command = [NAME, *ARGUMENTS, f"--user-data-dir={profile}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done


def look_at(pages: dict[str, str], widths: list[int], folder: Path, *, dark: bool) -> dict[str, dict]:
    """Opens pages in frames of several widths, all in one browser; fails unless each fits and can be read.

    Returns what the browser measured, by "page at width".
    """
    content = json.dumps({"html": pages, "widths": widths}).replace("<", "\\u003c")
    path = folder / f"harness-{'dark' if dark else 'light'}.html"
    path.write_text(HARNESS.replace("PAGES", content), encoding="utf-8")
    done = start([*([DARK] if dark else []), "--dump-dom", path.as_uri()], folder)
    result = done.stdout.rpartition('<pre id="result">')[2].partition("</pre>")[0]
    seen = json.loads(html.unescape(result))
    assert len(seen) == len(widths) * len(pages)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []  # what pages complain of
    for place, it in seen.items():
        assert it["dark"] == dark, place
        assert (it["scroll"] <= it["width"], it["outside"]) == (True, []), place
        assert (it["loaded"], it["cut"], it["crossing"]) == ([], [], []), place
        assert [pair for pair in it["colours"] if contrast(*pair[:2]) < 4.5] == [], place
        assert len(it["colours"]) >= 2, place
    # A frame of 390 has a scroll bar, which a phone lays over the page.
    assert seen["sample at 390"]["smallest"] > 10.5
    return seen
