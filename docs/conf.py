"""Sphinx: ``make docs`` writes the site to build/docs. Warnings are errors; nothing is fetched, then or by a reader."""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

import adabayes

project = "AdaBayes"
author = "the AdaBayes contributors"
release = version = adabayes.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!adabayes).*|.*\._.*")
]  # others' sites are not asked; what is private has no page

autodoc_mock_imports = ["timm"]  # it needs a torchvision that fits the build of torch
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
napoleon_use_rtype = False

html_theme = "furo"
html_title = "AdaBayes"
html_math_renderer = "mathml"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "monokai"


def math(translator: HTML5Translator, node: nodes.math) -> None:
    """As MathML, which browsers draw by themselves."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def math_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (math, None), (math_block, None))
