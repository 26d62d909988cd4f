"""Sphinx configuration. Build from the repository root: `sphinx-build -W -n docs HTML_FOLDER`. Needs no network."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

from mtpjax.version import __version__  # noqa: E402

project = "mtpjax"
author = "the mtpjax authors"
copyright = author
version = release = __version__

extensions = [
    "myst_nb",  # pages in Markdown, and notebooks
    "sphinx.ext.autodoc",  # the reference comes from the docstrings
    "sphinx.ext.autosummary",  # tables of names at the top of the reference pages
    "sphinx.ext.napoleon",  # Google-style docstrings
    "sphinx.ext.viewcode",  # links from the reference to the source
    "cli_reference",  # docs/_ext: the flags of the `mtpjax` command
    "docstrings",  # docs/_ext: code in backticks, defaults of settings
    "public_names",  # docs/_ext: every public name must be on a reference page
]
exclude_patterns = ["_ext", "_build", "**.ipynb_checkpoints"]

# Markdown. Headings of three levels can be linked to as on GitHub: page.md#some-heading.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
smartquotes = False  # otherwise `--flag` in a help text becomes a dash and a word

# Notebooks are executed at every build; an error in a cell ends the build.
nb_execution_mode = "force"
nb_execution_timeout = 120  # seconds per cell
nb_execution_raise_on_error = True
nb_output_stderr = "remove"  # the training progress

# Docstrings. A name between single backticks links to its entry, or is code if it has none.
default_role = "py:obj"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 100
python_display_short_literal_types = True
viewcode_follow_imported_members = True

# `-n` warns of names without an entry. Types of other packages have no entry, because no index is fetched. Internal
# types in signatures, and code in backticks, have none either.
nitpick_ignore_regex = [
    ("py:obj", "(?s).*"),
    ("py:(class|exc|data)", ".*"),
]

html_theme = "sphinx_book_theme"
html_title = f"mtpjax {version}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_theme_options = {
    "navbar_persistent": [],  # the sidebar has the search field
    "footer_content_items": [],
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "show_navbar_depth": 1,
}
