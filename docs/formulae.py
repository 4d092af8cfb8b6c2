"""Formulae as MathML, which browsers draw themselves: no script, no font, no network. docutils turns TeX into it.

On the pages a formula is TeX, in the form that code hosts know too: ``$T_j$`` or a block ``math``. In a docstring it is plain
text, to be read in a terminal: what it is in TeX stands here, and one that does not fails the build. ``T_j`` or ``P_K(1)`` in a
sentence needs neither.
"""

import re

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.util.logging import getLogger

TEX = {
    """
    L = t log sum_{S in Y} exp((margin [y not in S] + sum_{j in S} s_j / k) / t)
      - t log sum_{S in Y_y} exp(sum_{j in S} s_j / (k t)).
    """: r"""
    \begin{aligned}
    L = {} & t \log \sum_{S \in Y} \exp \Bigl(
    \frac{1}{t} \Bigl( \mathrm{margin}\,[y \notin S] + \frac{1}{k} \sum_{j \in S} s_j \Bigr) \Bigr) \\
    & - t \log \sum_{S \in Y_y} \exp \Bigl( \frac{1}{k t} \sum_{j \in S} s_j \Bigr)
    \end{aligned}
    """,
    'm = soft_topk(s, k, "lapsum", t),': r"m = \operatorname{softtopk}(s, k, t), \qquad \sum_i m_i = k",
    "L = sigmoid((s_y - s_[k]) / t) log sum_j exp(s_j - s_y)": r"""
    L = \operatorname{sigmoid}\Bigl( \frac{s_y - s_{[k]}}{t} \Bigr) \, \log \sum_j e^{s_j - s_y}
    """,
    "larger = alpha a + (1 - alpha) b,    smaller = (1 - alpha) a + alpha b.": r"""
    \mathrm{larger} = \alpha a + (1 - \alpha)\, b, \qquad \mathrm{smaller} = (1 - \alpha)\, a + \alpha b
    """,
    """
    alpha   max(0, (b_(1) + … + b_(k)) / k)
    beta    (max(0, b_(1)) + … + max(0, b_(k))) / k
    """: r"""
    \begin{aligned}
    \text{alpha} \quad & \max\Bigl( 0, \frac{b_{(1)} + \cdots + b_{(k)}}{k} \Bigr) \\
    \text{beta} \quad & \frac{\max(0, b_{(1)}) + \cdots + \max(0, b_{(k)})}{k}
    \end{aligned}
    """,
    "L = log(1 + exp(a_(k)) + exp(a_(k+1)) + …)": r"L = \log\bigl( 1 + e^{a_{(k)}} + e^{a_{(k+1)}} + \cdots \bigr)",
    "1 / log2(1 + r) if r <= k, otherwise 0,    r the rank of the target.": r"""
    \begin{cases} 1 / \log_2(1 + r) & \text{if } r \le k \\ 0 & \text{otherwise} \end{cases}
    \qquad r \text{ the rank of the target}
    """,
    """
    C(x) = {j : p_j(x) >= q, or j is the first guess},
    q = the ceil((n + 1) coverage)-th largest p_y(x) of the n examples, infinite where y is the first guess
    """: r"""
    \begin{aligned}
    C(x) & = \{ j : p_j(x) \ge q \text{, or } j \text{ is the first guess} \}, \\
    q & = \text{the } \lceil (n + 1) \, \mathrm{coverage} \rceil \text{-th largest } p_y(x) \text{ of the } n \text{ examples,
    infinite where } y \text{ is the first guess}
    \end{aligned}
    """,
    "coverage <= P(y in C(x)) < coverage + 1 / (n + 1)": r"""
    \mathrm{coverage} \le P(y \in C(x)) < \mathrm{coverage} + \frac{1}{n + 1}
    """,
    """
    separate    P_K(1) CE(s, y) - (1 - P_K(1)) log( sum_{j>=2} P_K(j) T_j / (1 - P_K(1)) )
    mixed       -log( P_K(1) softmax_y(s) + sum_{j>=2} P_K(j) T_j )
    operator    -log( sum_j P_K(j) T_j )
    """: r"""
    \begin{aligned}
    \text{separate} \quad & P_K(1)\, \mathrm{CE}(s, y) - (1 - P_K(1)) \log \sum_{j \ge 2} \frac{P_K(j)\, T_j}{1 - P_K(1)} \\
    \text{mixed} \quad & {-\log} \Bigl( P_K(1)\, \mathrm{softmax}_y(s) + \sum_{j \ge 2} P_K(j)\, T_j \Bigr) \\
    \text{operator} \quad & {-\log} \sum_j P_K(j)\, T_j
    \end{aligned}
    """,
    "L = ce_weight CE(s, y) + (1 - ce_weight) sum_j P_K(j) (1 - T_j^q) / q": r"""
    L = \mathtt{ce\_weight} \; \mathrm{CE}(s, y) + (1 - \mathtt{ce\_weight}) \sum_j P_K(j) \, \frac{1 - T_j^{\,q}}{q}
    """,
    "sum_i w_i L(s(x_i), y_i) / sum_i w_i  +  alpha / 2 * (sum of the squared weights, without the intercepts).": r"""
    \frac{\sum_i w_i\, L(s(x_i), y_i)}{\sum_i w_i}
    + \frac{\alpha}{2} \, (\text{sum of the squared weights, without the intercepts})
    """,
}
"""A formula of a docstring -> TeX."""

SYMBOL = re.compile(r"(?<![\w.`/-])([A-Za-z])_(\w|\([\w+-]+\)|\[\w+\])(\(\w\))?(?![\w(\[])")
"""A letter with an index: T_j, P_K(1), a_(k), s_[r]."""


BAR = re.compile(r"<mo([^>]*)>\|</mo>")
APPLIED = re.compile(r"<mo>&ApplyFunction;</mo>(?!\s*(?:<mrow>\s*)?<mo[^>]*>[(|])")

UNTOUCHED = (
    *(nodes.literal, nodes.literal_block, nodes.math, nodes.math_block, nodes.raw, nodes.comment),
    *(nodes.title, nodes.strong, addnodes.literal_strong, addnodes.desc_signature),  # p_k is the name of an argument there
)


def plain(text):
    return re.sub(r"\s+", " ", text).strip()


_KNOWN = {plain(formula): tex for formula, tex in TEX.items()}


def of_docstring(lines, name):
    """The directive for the lines of a formula in the docstring of ``name``."""
    tex = _KNOWN.get(plain("\n".join(lines)))
    if tex is None:
        getLogger("anyk").warning("%s: no TeX in docs/formulae.py for the formula\n%s", name, "\n".join(lines))
        return ["::", "", *lines]
    return [".. math::", "", *(f"   {line.strip()}" for line in tex.strip().splitlines())]


def typeset_symbols(app, doctree):
    """Letters with an index in plain sentences."""
    for text in list(doctree.findall(nodes.Text)):
        if not SYMBOL.search(text) or any(isinstance(parent, UNTOUCHED) for parent in ancestors(text)):
            continue
        parts, end = [], 0
        for found in SYMBOL.finditer(text):
            letter, index, argument = found.groups(default="")
            tex = f"{letter}_{{{index}}}{argument}"
            parts += [nodes.Text(text[end : found.start()]), nodes.math(tex, tex)]
            end = found.end()
        text.parent.replace(text, [*parts, nodes.Text(text[end:])])


def ancestors(node):
    while node.parent is not None:
        node = node.parent
        yield node


def _mathml(node, block):
    try:
        mathml = tex2mathml(node.astext(), as_block=block)
    except MathError as error:
        getLogger("anyk").warning("not understood: %s: %s", node.astext(), error, location=node)
        return node.astext()
    # Browsers leave no space between a function and its argument, as in log T, and too much beside the bars of |x|.
    mathml = APPLIED.sub(r'\g<0><mspace width="0.17em"></mspace>', mathml)
    return BAR.sub(r'<mo\1 lspace="0" rspace="0">|</mo>', mathml)


def _inline(writer, node):
    after = node.next_node(descend=False, siblings=True)
    joined = isinstance(after, nodes.Text) and after[:1] in tuple(".,;:)")
    writer.body.append(_mathml(node, block=False) + "\N{WORD JOINER}" * joined)  # no full stop begins a line
    raise nodes.SkipNode


def _block(writer, node):
    writer.body.append(f'<div class="math">{_mathml(node, block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("doctree-read", typeset_symbols)
