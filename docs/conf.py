"""Sphinx configuration. The pages of the API reference are written here, from what each package lists as public."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from api_reference import write_reference

import gramscope

project = "gramscope"
author = "The gramscope founders"
copyright = "2026, The gramscope founders"
version = release = gramscope.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # shapes stand in the signature of the docstring's own words
autodoc_member_order = "bysource"
copybutton_prompt_text = ">>> "

html_theme = "pydata_sphinx_theme"
html_title = "gramscope"
html_theme_options = {
    "show_nav_level": 1,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "header_links_before_dropdown": 6,
}
html_static_path = ["_static"]
html_css_files = ["gramscope.css"]

write_reference(Path(__file__).parent / "reference")


def escape_docstring(app, what, name, obj, options, lines):
    """Outside of code, the signs * | _ are letters: our docstrings have formulas and globs, and no emphasis."""
    for place, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            pieces = re.split(r"(``.+?``)", line)
            pieces[::2] = [re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", piece) for piece in pieces[::2]]
            pieces[1::2] = [piece.replace(" ... ", " … ") for piece in pieces[1::2]]  # dots would end the sentence
            lines[place] = "".join(pieces)


def skip_member(app, what, name, obj, skip, options):
    """scikit-learn adds set_fit_request and its like, which are not ours to explain."""
    return skip or (name.startswith("set_") and name.endswith("_request"))


def setup(app):
    app.connect("autodoc-process-docstring", escape_docstring, priority=1)  # before napoleon
    app.connect("autodoc-skip-member", skip_member)
