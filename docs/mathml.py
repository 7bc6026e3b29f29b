"""A hook of mkdocs: formulas become MathML when the pages are built, so that a browser shows them with no script."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves: \(inline\) in a span, \[block\] in a div.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
# Space, where MathML and TeX differ. A full stop and infinity are no operators, with space on both sides; a function
# has space behind it.
_NO_OPERATOR = re.compile(r"<mo>(&#x0002E;|&#x0221E;)</mo>")
_FUNCTION = re.compile(r"<(m[io])>(ln|max|tanh)</\1>")
# A minus between two operators, as in "= -1", is a sign.
_SIGN = re.compile(r'(<mo(?: stretchy="false")?>&#x000(?:3D|2C|28);</mo>)<mo>(?=&#x02212;)')


def to_mathml(tex: str, display: str) -> str:
    """A formula as a ``<math>`` element; display is "inline" or "block".

    Raises:
        ValueError: It has a command that the converter does not know.
    """
    made = convert(tex.strip(), display=display)
    if "\\" in made:
        raise ValueError(f"no MathML for {tex!r}: {made}")
    made = _SIGN.sub(r'\1<mo form="prefix">', _NO_OPERATOR.sub(r"<mi>\1</mi>", made))
    return _FUNCTION.sub(r'<mo lspace="0" rspace="0.167em">\2</mo>', made)


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page; converts its formulas."""

    def element(match: re.Match[str]) -> str:
        tag, tex = match.groups()
        made = to_mathml(html.unescape(tex), "block" if tag == "div" else "inline")
        return f'<{tag} class="arithmatex">{made}</{tag}>'

    return _FORMULA.sub(element, content)
