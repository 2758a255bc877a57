"""MkDocs hook: write every formula as MathML, which a browser draws without any script or font.

pymdownx.arithmatex (generic) marks formulas as `\\(...\\)` and `\\[...\\]` inside elements of class
`arithmatex`; this replaces those elements after a page has become HTML, docstrings included.
"""

import html
import re

from latex2mathml.converter import convert

_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\s*'
    r"\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]\s*</(?P=tag)>",
    re.DOTALL,
)


def _as_mathml(match: re.Match[str]) -> str:
    display = "block" if match["open"] == "[" else "inline"
    latex = html.unescape(match["latex"]).strip()
    return convert(latex, display=display)


def on_page_content(html: str, **_: object) -> str:
    return _FORMULA.sub(_as_mathml, html)
