"""Sphinx configuration: `make docs`."""

import gumbeljax

project = "gumbeljax"
author = "the gumbeljax authors"
version = release = gumbeljax.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 2  # links to headings of a page
nb_execution_mode = "off"
autodoc_typehints = "none"  # shapes and dtypes are told in the docstrings
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "gumbeljax"
