"""The site as a reader has it: it builds strictly, asks nobody, and every page fits a desktop and a phone in a real browser."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from test_guide import DOCS, ROOT

WIDTHS = {"desktop": 1280, "phone": 390}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    for module in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(module, reason='the site needs pip install "anyk[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(folder / "trees")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([*command, str(DOCS), str(folder / "site")], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


# --- the files --------------------------------------------------------------------------------------------------------


def test_the_site_asks_nobody(site):
    for page in site.rglob("*.html"):
        outside = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="((?:https?:)?//[^"]+)"', page.read_text())
        assert not outside, (page.name, outside)
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import\s+)[\"']?(?:https?:)?//", sheet.read_text()), sheet.name


def test_formulae_are_typeset(site):
    """MathML, which needs no script; no TeX and no plain formula is left."""
    for name in ("reference", "mathematics"):
        text = (site / f"{name}.html").read_text()
        assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">' in text
        shown = re.sub(r"<code.*?</code>|<pre.*?</pre>|<script.*?</script>", "", text, flags=re.DOTALL)
        assert not re.findall(r"\\[a-z]+\b|\$[^$<]+\$|sum_\{", shown)
        assert not re.search(r"<script[^>]*(?:mathjax|katex)", text, re.IGNORECASE)


def test_the_contents_have_twelve_pages_at_most(site):
    listed = re.findall(
        r'<li class="toctree-l1[^"]*"><a class="reference internal" href="([\w-]+)\.html"', (site / "index.html").read_text()
    )
    assert 5 < len(set(listed)) == len(listed) <= 11  # and the index


def test_the_index_leads_to_the_page_to_play_with(site):
    assert 'href="play.html"' in (site / "index.html").read_text()
    assert (site / "play.html").exists()


# --- in a browser -----------------------------------------------------------------------------------------------------

SIDEWAYS = """(() => {
  const scrolls = box => ["auto", "scroll"].includes(getComputedStyle(box).overflowX);  // what is hidden is lost
  const boxed = e => {  // by something smaller than the whole text, which scrolls as well on a phone
    for (let p = e.parentElement; !p.matches("article, main, body"); p = p.parentElement) if (scrolls(p)) return true;
    return false;
  };
  const beyond = e => e.getBoundingClientRect().right > innerWidth + 1;
  const wide = [...document.querySelectorAll("article *, main *")].filter(e => beyond(e) && !boxed(e));
  return { width: document.documentElement.scrollWidth, wide: wide.slice(0, 3).map(e => e.outerHTML.slice(0, 120)) };
})()"""

BROKEN_CELLS = """[...document.querySelectorAll("td.short, th.short")].filter(cell => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  const tops = [...range.getClientRects()].filter(box => box.width > 0).map(box => box.bottom);
  return Math.max(...tops) - Math.min(...tops) > 1.2 * parseFloat(getComputedStyle(cell).lineHeight);
}).map(cell => cell.textContent)"""


def assert_fits(tab, file: Path, width: int) -> None:
    tab.open(file, width=width, height=900, touch=width < 600)
    found = tab.evaluate(SIDEWAYS)
    assert found["width"] <= width, (file.name, found)
    assert found["wide"] == [], file.name
    assert tab.evaluate(BROKEN_CELLS) == [], file.name
    assert tab.complaints == [], (file.name, tab.complaints)
    assert [address for address in tab.requests if not address.startswith(("file:", "data:"))] == []


@pytest.mark.full
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_every_page_fits_the_screen(tab, site, width):
    files = sorted(site.glob("*.html"))
    assert {file.stem for file in files} > {file.stem for file in DOCS.glob("*.md")}
    for file in files:
        assert_fits(tab, file, width)


@pytest.mark.full
def test_what_does_not_fit_would_be_noticed(tab, tmp_path):
    file = tmp_path / "wide.html"
    file.write_text('<main><p style="width: 900px">wide</p></main><script>console.error("oh")</script>')
    with pytest.raises(AssertionError):
        assert_fits(tab, file, 390)
    with pytest.raises(AssertionError, match="oh"):
        assert_fits(tab, file, 1280)


@pytest.mark.full
def test_wide_tables_scroll_by_themselves(tab, site):
    tab.open(site / "choosing.html", width=390, height=900, touch=True)
    room = tab.evaluate('[...document.querySelectorAll(".table-wrapper")].map(box => [box.clientWidth, box.scrollWidth])')
    assert any(scrolled > own for own, scrolled in room)
    assert all(own <= 390 for own, _ in room)


SCROLLING = """selector => [...document.querySelectorAll(selector)].filter(box => box.scrollWidth > box.clientWidth + 1)
  .map(box => box.textContent.trim().slice(0, 60))"""


@pytest.mark.full
def test_tables_are_whole_on_a_desktop(tab, site):
    """But for what is written from studies."""
    for name in ("index", "start", "choosing", "recipes", "lab", "own-data", "scale", "mathematics", "tools"):
        tab.open(site / f"{name}.html", width=1280, height=900, touch=False)
        assert tab.evaluate(f'({SCROLLING})(".table-wrapper")') == [], name


@pytest.mark.full
def test_the_line_to_write_is_whole_on_a_phone(tab, site):
    for name in ("index", "start", "choosing"):
        tab.open(site / f"{name}.html", width=390, height=900, touch=True)
        whole, *_ = tab.evaluate(
            "[...document.querySelectorAll('div.highlight-python pre')].map(e => e.scrollWidth <= e.clientWidth)"
        )
        assert whole, name
