"""Sphinx configuration. The pages of the API reference are written here, from what each package lists as public."""

import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from api_reference import write_reference
from bibliography import write_bibliography
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.typing import stringify_annotation
from where_used import every_name, lines

import gramscope
import gramscope.capture.network

HERE = Path(__file__).parent
project = "gramscope"
author = "The gramscope founders"
copyright = "2026, The gramscope founders"
version = release = gramscope.__version__

extensions = [
    "myst_nb",
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
# Every notebook is run when the site is built; NOTEBOOKS=off shows the outputs that it was committed with.
nb_execution_mode = os.environ.get("NOTEBOOKS", "force")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_output_stderr = "remove"
autodoc_typehints = "signature"  # with the shapes of tensors
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 72
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
copybutton_prompt_text = ">>> "

html_theme = "pydata_sphinx_theme"
html_title = f"gramscope {version}"
html_theme_options = {
    "show_nav_level": 1,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "header_links_before_dropdown": 6,
}
html_static_path = ["_static"]
html_css_files = ["gramscope.css"]

analyze = ModuleAnalyzer.analyze
# What every `outputs=` takes (docs/arguments.md).
OUTPUTS = stringify_annotation(gramscope.capture.network.Outputs, "smart")

write_reference(HERE / "reference")
write_bibliography(HERE / "references.bib", HERE / "references.md")


def escape_docstring(app, what, name, obj, options, lines):
    """Outside of code, the signs * | _ are letters: our docstrings have formulas and globs, and no emphasis."""
    for place, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            pieces = re.split(r"(``.+?``)", line)
            pieces[::2] = [re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", piece) for piece in pieces[::2]]
            pieces[1::2] = [piece.replace(" ... ", " … ") for piece in pieces[1::2]]  # dots would end the sentence
            lines[place] = "".join(pieces)


def add_where_used(app, what, name, obj, options, lines_):
    """Below the docstring of a public name: what returns it, and the pages that use it."""
    public = next((known for known, value in every_name().items() if value is obj), None)
    if public is not None and what in ("function", "class", "exception"):
        lines_ += lines(public)


def short_types(app, what, name, obj, options, signature, returned):
    """Names of long unions, and of modules that say nothing to a reader."""
    return tuple(text and re.sub(r"~(\w+\.)+", "", text.replace(OUTPUTS, "Outputs")) for text in (signature, returned))


def skip_member(app, what, name, obj, skip, options):
    """scikit-learn adds set_fit_request and its like, which are not ours to explain."""
    return skip or (name.startswith("set_") and name.endswith("_request"))


def prepare_page(app, docname, source):
    """The empty line that ends a doctest is not shown. A link to a page outside of docs/ becomes its address."""
    source[0] = re.sub(r"\n\n```(?=\n|$)", "\n```", source[0])
    source[0] = re.sub(r"\[([^\]]*)\]\((\.\./)([^)]*\.md)\)", r"\1: `\3`", source[0])


def without_overloads(analyzer):
    """One signature for each function: its overloads are for type checkers."""
    analyze(analyzer)
    analyzer.overloads = {}


def setup(app):
    ModuleAnalyzer.analyze = without_overloads
    # Of a property napoleon would take what stands before a colon for its type.
    GoogleDocstring._parse_attribute_docstring = GoogleDocstring._consume_to_end
    app.connect("source-read", prepare_page)
    app.connect("autodoc-process-docstring", escape_docstring, priority=1)  # before napoleon
    app.connect("autodoc-process-docstring", add_where_used, priority=900)  # after it
    app.connect("autodoc-process-signature", short_types)
    app.connect("autodoc-skip-member", skip_member)
