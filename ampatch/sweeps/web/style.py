"""The style sheet of the page: light, dark and printed, from a phone to a wide screen."""

from __future__ import annotations

from collections.abc import Sequence

from ampatch.sweeps.web.colours import DARK, DARK_PARTS, LIGHT, LIGHT_PARTS

# Below its width a table becomes cards: the width depends on how many columns it has.
CARDS_BELOW = (560, 700, 840, 980, 1120, 1200)
NAME_COLUMN, COLUMN, NARROW_COLUMN = 220, 96, 74


def table_class(columns: int, width: int = COLUMN) -> str:
    """Returns the class that turns a table of so many columns into cards where there is no room for it.

    >>> table_class(4), table_class(8), table_class(30)
    ('cards-700', 'cards-1120', 'cards-1200')
    """
    needed = NAME_COLUMN + width * columns
    return f"cards-{next((width for width in CARDS_BELOW if width >= needed), CARDS_BELOW[-1])}"


LIGHT_SURFACES = """--page:#ffffff;--surface:#f5f6f8;--ink:#16191d;--muted:#555c66;--rule:#d9dde3;
--grid:#e4e7eb;--axis:#7c8490;--good:#0b6b5d;--bad:#a32a12;--link:#2a52be;"""
DARK_SURFACES = """--page:#14171a;--surface:#1d2125;--ink:#e8eaed;--muted:#a7aeb8;--rule:#3a4148;
--grid:#2b3136;--axis:#808893;--good:#6fd0bd;--bad:#ff9d80;--link:#9dbbff;"""


def colour_variables(colours: Sequence[str], parts: Sequence[str]) -> str:
    """Returns the colours of rows and of parts as variables."""
    rows = "".join(f"--c{index}:{colour};" for index, colour in enumerate(colours))
    return rows + "".join(f"--p{index}:{colour};" for index, colour in enumerate(parts))


LIGHT_SCHEME = LIGHT_SURFACES + "\n" + colour_variables(LIGHT, LIGHT_PARTS)
DARK_SCHEME = DARK_SURFACES + "\n" + colour_variables(DARK, DARK_PARTS)

TEXT = """
*,*::before,*::after{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main,header,footer{max-width:1180px;margin:0 auto;padding:0 12px}
@media (min-width:420px){main,header,footer{padding:0 24px}}
header{padding-top:32px}
footer{padding-top:24px;padding-bottom:40px;color:var(--muted);font-size:14px}
h1,h2,h3{line-height:1.2;text-wrap:balance;overflow-wrap:anywhere;margin:0}
h1{font-size:clamp(26px,4vw,36px);font-weight:680;letter-spacing:-.015em}
h2{font-size:22px;font-weight:650;letter-spacing:-.01em;padding-top:14px;border-top:1px solid var(--rule)}
h3{font-size:15px;font-weight:650;margin:26px 0 8px}
section{margin-top:44px}
p,ul,pre,dl{margin:10px 0}
p{max-width:72ch}
p,li,dd,td,tbody th,figcaption,.long{overflow-wrap:anywhere}
.long{display:inline-block}
a{color:var(--link);text-underline-offset:2px}
a:focus-visible{outline:2px solid var(--link);outline-offset:2px}
code,pre,kbd{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
code,.name{unicode-bidi:isolate;overflow-wrap:anywhere}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--surface);border-radius:6px;padding:10px 12px}
.muted,.note{color:var(--muted)}
.note{font-size:14px;margin:6px 0 0}
.command{margin:10px 0 0;color:var(--muted);max-width:none}
.facts{display:flex;flex-wrap:wrap;gap:4px 24px;margin:12px 0 0;color:var(--muted);font-size:14px}
.facts li{min-width:0}
.facts,.legend,nav ul{list-style:none;padding:0}
nav ul{display:flex;flex-wrap:wrap;gap:2px 18px;margin:22px 0 0;font-size:14px}
nav a{display:inline-block;padding:3px 0}
"""

ADVICE = """
.advice{margin:24px 0 0;padding:18px 20px 20px;background:var(--surface);border-left:4px solid var(--ink);
border-radius:2px 8px 8px 2px}
.advice h2{border:0;padding:0;font-size:14px;font-weight:600;letter-spacing:0;color:var(--muted)}
.advice .take{font-size:clamp(24px,5vw,34px);font-weight:700;line-height:1.2;letter-spacing:-.01em;
margin:2px 0 6px}
.advice .why{margin:0;font-size:17px}
.stats{display:grid;
grid-template-columns:repeat(auto-fill,minmax(min(100%,132px),1fr));gap:14px 20px;margin:18px 0 0}
.stats dt{font-size:13px;color:var(--muted);line-height:1.3;overflow-wrap:anywhere}
.stats dd{margin:0;font-size:22px;font-weight:650;line-height:1.25;font-variant-numeric:tabular-nums}
.stats small{display:block;font-size:13px;font-weight:400;color:var(--muted)}
"""

TABLES = """
table{width:100%;border-collapse:collapse;margin:14px 0 0;font-size:14px;line-height:1.35;
font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--muted);padding-bottom:8px;caption-side:top}
th,td{padding:8px 0 8px 14px;text-align:right;vertical-align:top;border-bottom:1px solid var(--rule)}
th:first-child,td:first-child{padding-left:8px}
th:last-child,td:last-child{padding-right:8px}
thead th{font-weight:500;color:var(--muted);font-size:13px;vertical-align:bottom;
border-bottom-color:var(--axis)}
.left,tbody th{text-align:left;font-weight:400}
tbody th{width:236px}
.word{display:inline-block;max-width:100%}
tbody th .name{font-weight:650}
tbody th .tag+.name{font-size:13px}
td small,th small{display:block;font-size:12.5px;color:var(--muted);font-weight:400}
.whole,.flag,td small{white-space:nowrap}
td .reason{white-space:normal;min-width:110px}
tr.best th,tr.best td{background:var(--surface)}
tr.best th{box-shadow:inset 3px 0 var(--ink)}
.tag{display:inline-block;font-size:12px;font-weight:500;color:var(--muted);border:1px solid var(--axis);
border-radius:3px;padding:0 4px;line-height:1.4;margin-right:5px}
.verdict{font-weight:650}
.same{color:var(--good)}
.worse,.diverged,.failed{color:var(--bad)}
.pairs tbody th{color:var(--muted);width:150px;padding-left:0;vertical-align:top}
.pairs td{text-align:left}
@media (max-width:559px){
.pairs th,.pairs td,.pairs tr,.pairs tbody{display:block;width:auto;padding:0}
.pairs tr{padding:7px 0;border-bottom:1px solid var(--rule)}
.pairs th,.pairs td{border:0}
}
"""

# A name, its verdict, then numbers in a grid, each under its heading.
CARDS = """
@media (max-width:{limit}px){{
.{name} thead{{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);
white-space:nowrap}}
.{name},.{name} tbody,.{name} caption{{display:block}}
.{name} tbody{{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr))}}
.{name} tr{{display:grid;grid-template-columns:repeat(auto-fill,minmax(86px,1fr));gap:10px 12px;
align-content:start;border:1px solid var(--rule);border-radius:8px;padding:12px 14px}}
.{name} tr.best{{border-left:4px solid var(--ink);background:var(--surface)}}
.{name} tr.best th{{box-shadow:none}}
.{name} th,.{name} td{{display:block;padding:0!important;border:0;text-align:left;min-width:0}}
.{name} tbody th,.{name} .wide{{grid-column:1/-1}}
.{name} tbody th .name{{font-size:17px}}
.{name} td::before{{content:attr(data-label);display:block;font-size:12.5px;color:var(--muted);
line-height:1.25}}
.{name} td.wide::before,.{name} td.none{{display:none}}
.{name} .whole,.{name} td small{{white-space:normal}}
.{name} tbody th{{width:auto}}
}}"""

CHARTS = """
.charts{display:grid;gap:26px 28px;grid-template-columns:repeat(auto-fill,minmax(min(100%,336px),1fr));
margin:16px 0 0}
.panels{display:grid;margin:12px 0 0;align-items:end;gap:16px 8px;
grid-template-columns:repeat(auto-fill,minmax(min(46%,164px),1fr))}
@media (min-width:700px){.panels{gap:18px 20px}}
.pair{display:grid;gap:16px;align-content:start;min-width:0}
figure{margin:0;min-width:0}
figcaption{font-size:14px;line-height:1.35;margin-bottom:8px}
figcaption b{font-weight:650}
figcaption small{display:block;font-size:13px;color:var(--muted)}
.panels figcaption{font-size:13px;margin-bottom:3px}
.panels .name{font-weight:650}
.panels .tag+.name{font-size:12px}
svg{display:block;width:100%;height:auto;overflow:visible}
svg svg{overflow:hidden}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
fill:var(--muted);font-variant-numeric:tabular-nums}
svg .strong{fill:var(--ink);font-weight:650}
svg .key{fill:var(--ink)}
.grid{stroke:var(--grid)}
.axis{stroke:var(--axis)}
.mean,.run,.leader,.scale,.mark,.behind{fill:none;stroke:var(--k);stroke-linejoin:round}
.mean{stroke-width:1.8}
.k0.mean{stroke-width:2.4}
.run{stroke-width:.8;opacity:.3}
.behind{stroke-width:1.2;opacity:.65}
.leader{stroke-width:.7;opacity:.7}
.scale{stroke-width:1.5}
.mark{stroke-width:2}
.skip{stroke:var(--ink);stroke-width:1.3;fill:none}
.bar,.dot{fill:var(--k)}
.dot{stroke:var(--page);stroke-width:.8}
.band{fill:var(--ink);opacity:.09}
.rule{stroke:var(--ink);stroke-dasharray:2 2}
.whisker{stroke:var(--ink);stroke-width:1.2;fill:none}
.halo{stroke:var(--page);stroke-width:3.6;fill:none}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;margin:12px 0 0;line-height:1.4}
.legend li{display:flex;gap:7px;min-width:0}
.legend svg{flex:none;width:30px;height:18px}
.legend b{font-weight:650}
.legend .block svg{width:14px}
"""

PRINT = """
@page{margin:14mm 12mm}
@media print{
body{font-size:10.5pt}
main,header,footer{padding:0;max-width:none}
header{padding-top:0}
nav{display:none}
section{margin-top:24px}
h2,h3,caption,figcaption{break-after:avoid}
figure,.pair,tr,.advice,.failure,.stats,.legend{break-inside:avoid}
.note,.legend{break-after:avoid}
.charts{grid-template-columns:1fr 1fr}
.panels{grid-template-columns:repeat(4,1fr)}
.advice,pre,tr.best,tr.best th,tr.best td{background:none!important}
pre{border:1px solid var(--rule)}
a{color:inherit;text-decoration:none}
}
"""


def style_sheet() -> str:
    """Returns the whole style sheet."""
    keys = "".join(f".k{index}{{--k:var(--c{index})}}" for index in range(len(LIGHT)))
    parts = "".join(f".part{index}{{fill:var(--p{index})}}" for index in range(len(LIGHT_PARTS)))
    cards = "".join(CARDS.format(name=f"cards-{width}", limit=width - 1) for width in CARDS_BELOW)
    schemes = (
        f":root{{color-scheme:light dark;{LIGHT_SCHEME}}}\n"
        # What is printed stays black on white.
        f"@media screen and (prefers-color-scheme:dark){{:root{{{DARK_SCHEME}}}}}\n"
        "@media print{:root{color-scheme:light;--ink:#000;--muted:#3d434b}}"
    )
    return "\n".join([schemes, TEXT, ADVICE, TABLES, cards, CHARTS, keys, parts, PRINT])
