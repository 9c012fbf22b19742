"""Sphinx configuration."""

project = "gramscope"
author = "The gramscope founders"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "pydata_sphinx_theme"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
