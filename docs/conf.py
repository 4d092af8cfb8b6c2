"""The site: `make docs` builds it from these pages with Sphinx. Every warning is an error.

The pages are plain Markdown, to be read on a code host as well. What the site adds stands here: docstrings in the place of the
lists of reference.md, links from code names to them, formulae as MathML (formulae.py), and the page to play with beside them.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref

import anyk

sys.path.insert(0, str(Path(__file__).parent))
import formulae

project, author = "anyk", "the authors of anyk"
version = release = anyk.__version__
html_title = f"anyk {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "formulae"]
html_math_renderer = "mathml"
exclude_patterns = ["_*"]
nitpicky = True
default_role = "literal"
highlight_language = "none"  # formulae and commands; Python says so itself
myst_heading_anchors = 3  # links to headings, as on a code host
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]  # formulae, as on a code host

autodoc_default_options = {"members": True}
autodoc_typehints = "none"  # shapes are told in the docstrings
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = False
napoleon_custom_sections = [("Shape", "notes_style")]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["play.html"]
html_copy_source = False
html_show_copyright = False

CONTENTS = {
    "Use it": ("start", "operators", "choosing", "evidence", "recipes"),
    "On your data": ("lab", "own-data", "scale"),
    "Behind it": ("mathematics", "tools", "reference"),
}
"""The pages in their order: with the index, twelve at most. A page that is missing here, or there, fails the build."""

OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)]+\.md)\)")
"""A link to a page of the repository that is none of the guide: on the site, a file to download."""

PUBLIC_MODULES = ("anyk", "anyk.lab", "anyk.networks", "anyk.parallel", "anyk.ranking", "anyk.registry", "anyk.sklearn")
"""Every name in their __all__ must be documented in reference.md."""

LISTED = re.compile(r"^- `(anyk\.[\w.]+)`.*\n((?:  .*\n)*)", re.MULTILINE)
"""An entry of reference.md: the name, and a few words that the docstring replaces on the site."""

SHORT, SHORT_TITLE = 28, 12
"""Cells so long are not broken, of figures twice this. Longer ones get room for a few words a line; the table scrolls."""

HIDDEN = {
    *("set_fit_request", "set_score_request"),
    *("extra_repr", "forward", "arguments", "p_k", "weight", "spec", "conventions"),
    *("scale_power", "sorts", "dtype", "unconverged", "kernel_code", "kernel_description", "kernel_settings"),
}
"""What a class has for its base class, and no user calls."""


def public_names():
    """The names that a user can rely on."""
    for module in map(importlib.import_module, PUBLIC_MODULES):
        for name in module.__all__:
            if not inspect.ismodule(getattr(module, name)):
                yield f"{module.__name__}.{name}"


def directive(name):
    """What documents a name: autodoc's directive for its kind."""
    module, _, last = name.rpartition(".")
    thing = getattr(importlib.import_module(module), last, None)  # autodoc says what is missing
    if inspect.ismodule(thing):
        return f"```{{eval-rst}}\n.. automodule:: {name}\n   :no-members:\n```\n"
    kind = "class" if inspect.isclass(thing) else "function" if callable(thing) else "data"
    options = "   :no-value:\n" if kind == "data" else ""
    return f"```{{eval-rst}}\n.. py:currentmodule:: {module}\n.. auto{kind}:: {last}\n{options}```\n"


def add_to_page(app, page, source):
    """What a code host could not show: the table of contents, docstrings in the place of the list in reference.md."""
    if page == "index":
        for caption, pages in CONTENTS.items():
            lines = [":hidden:", f":caption: {caption}", "", *pages]
            source[0] += "\n```{toctree}\n" + "\n".join(lines) + "\n```\n"
    source[0] = OUTSIDE.sub(r"{download}`\1 <\2>`", source[0])
    if page == "reference":
        source[0] = LISTED.sub(lambda entry: directive(entry[1]), source[0])


def typeset(app, what, name, thing, options, lines):
    """Indented lines in the text of a docstring are a formula. Those below a heading such as "Args:" are not."""
    text, formula = [], []
    section = False
    for line in [*lines, ""]:
        if line and not line.startswith("    "):
            section = bool(re.fullmatch(r"[A-Z]\w+:", line))
        if line.startswith("    ") and not section and (formula or not (text and text[-1].strip())):
            formula.append(line)
            continue
        if formula:
            text += formulae.of_docstring(formula, name)
            formula = []
        text.append(line)
    lines[:] = text


def skip(app, what, name, thing, skipped, options):
    return True if name in HIDDEN else None


def link_names(app, doctree):
    """`anyk.LapSum` and `LapSum(…)` in a page link to the reference."""
    known = {full: full for full in public_names()}
    known.update({full.removeprefix("anyk."): full for full in list(known)})
    for literal in list(doctree.findall(nodes.literal)):
        if any(isinstance(parent, (nodes.reference, nodes.title, pending_xref)) for parent in formulae.ancestors(literal)):
            continue
        full = known.get(re.sub(r"\(.*\)$", "", literal.astext()))
        if full is not None:
            link = pending_xref("", refdomain="py", reftype="obj", reftarget=full, refdoc=app.env.docname, refexplicit=True)
            literal.replace_self(link)
            link += literal


def tables_scroll(app, doctree):
    """Cells that are not broken, and cells that have room: site.css."""
    for cell in doctree.findall(nodes.entry):
        text = cell.astext()
        figures = 4 * sum(map(str.isalpha, text)) < len(text)
        title = isinstance(cell.parent.parent, nodes.thead)
        most = SHORT_TITLE if title else SHORT * (1 + figures)
        cell["classes"].append("short" if len(text) <= most else "long")


def nothing_undocumented(app, environment):
    """A public name without an entry in the reference, or without a docstring, fails the build."""
    from sphinx.util.logging import getLogger

    documented = environment.domains.python_domain.objects
    for name in public_names():
        module, _, last = name.rpartition(".")
        if name not in documented:
            getLogger("anyk").warning("%s is public, but not in reference.md", name)
        if not inspect.getdoc(getattr(importlib.import_module(module), last)):
            getLogger("anyk").warning("%s is public, but has no docstring", name)


def setup(app):
    app.connect("source-read", add_to_page)
    app.connect("autodoc-process-docstring", typeset, priority=400)  # before napoleon reads the sections
    app.connect("autodoc-skip-member", skip)
    app.connect("doctree-read", link_names)
    app.connect("doctree-read", tables_scroll)
    app.connect("env-check-consistency", nothing_undocumented)
    return {"parallel_read_safe": True}
