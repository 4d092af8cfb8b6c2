"""The site as a reader has it: it builds strictly, asks nobody, and every page fits a desktop and a phone in a real browser."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import browser
from test_guide import DOCS, ROOT, public_names

WIDTHS = {"desktop": 1280, "phone": 390}
FEW = ("index", "mathematics", "explore", "gallery", "settings")
NEEDS_BROWSER = pytest.mark.skipif(browser.find() is None, reason="no Chromium here: apt-get install chromium")


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


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser.opened(tmp_path_factory.mktemp("profile")) as page:
        yield page


# --- the files --------------------------------------------------------------------------------------------------------


def test_the_reference_is_whole(site):
    reference = (site / "reference.html").read_text()
    for name in public_names():
        assert f'id="{name}"' in reference, name
    assert ":func:`" not in reference


def test_the_site_asks_nobody(site):
    for page in site.rglob("*.html"):
        outside = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="((?:https?:)?//[^"]+)"', page.read_text())
        assert not outside, (page.name, outside)
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import\s+)[\"']?(?:https?:)?//", sheet.read_text()), sheet.name


def test_formulae_are_typeset(site):
    """MathML, which needs no script; no TeX and no plain formula is left."""
    reference, mathematics = ((site / f"{name}.html").read_text() for name in ("reference", "mathematics"))
    assert reference.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') >= 9
    assert mathematics.count("<math ") > 60
    for text in (reference, mathematics):
        shown = re.sub(r"<code.*?</code>|<pre.*?</pre>|<script.*?</script>", "", text, flags=re.DOTALL)
        assert not re.findall(r"\\[a-z]+\b|\$[^$<]+\$|sum_\{", shown)
        assert not re.search(r"<script[^>]*(?:mathjax|katex)", text, re.IGNORECASE)


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


def assert_fits(page, file: Path, width: int) -> None:
    page.open(file, width=width, height=900, touch=width < 600)
    found = page.evaluate(SIDEWAYS)
    assert found["width"] <= width, (file.name, found)
    assert found["wide"] == [], file.name
    assert page.evaluate(BROKEN_CELLS) == [], file.name
    assert page.complaints == [], (file.name, page.complaints)
    assert [address for address in page.requests if not address.startswith(("file:", "data:"))] == []


@NEEDS_BROWSER
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("name", FEW)
def test_pages_fit_the_screen_and_nothing_is_complained_of(page, site, name, width):
    assert_fits(page, site / f"{name}.html", width)


@NEEDS_BROWSER
@pytest.mark.full
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_every_page_fits_the_screen(page, site, width):
    files = sorted(site.glob("*.html"))
    assert {file.stem for file in files} > {file.stem for file in DOCS.glob("*.md")}
    for file in files:
        assert_fits(page, file, width)


@NEEDS_BROWSER
def test_what_does_not_fit_would_be_noticed(page, tmp_path):
    file = tmp_path / "wide.html"
    file.write_text('<main><p style="width: 900px">wide</p></main><script>console.error("oh")</script>')
    with pytest.raises(AssertionError):
        assert_fits(page, file, 390)
    assert page.complaints == ["console.error: ['oh']"]
    with pytest.raises(AssertionError, match="oh"):
        assert_fits(page, file, 1280)


@NEEDS_BROWSER
def test_wide_tables_scroll_by_themselves(page, site):
    page.open(site / "settings.html", width=390, height=900, touch=True)
    room = page.evaluate('[...document.querySelectorAll(".table-wrapper")].map(box => [box.clientWidth, box.scrollWidth])')
    assert any(scrolled > own for own, scrolled in room)
    assert all(own <= 390 for own, _ in room)


@NEEDS_BROWSER
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_the_page_to_play_with_runs_in_the_site(page, site, width):
    """It is the page of `anyk draw --interactive`, and its frame is as high as it."""
    from anyk.lab import explore

    assert (site / "play.html").read_text() == explore.render()
    page.open(site / "explore.html", width=width, height=900, touch=width < 600)
    for _ in range(50):  # frames load on their own
        height, own = page.evaluate('(f => [f.style.height, f.clientWidth])(document.querySelector("iframe.play"))')
        if height:
            break
    page.open(site / "play.html", width=own, height=900, touch=width < 600)
    whole = page.evaluate('document.querySelector("main").getBoundingClientRect().height')
    assert float(height.removesuffix("px")) == pytest.approx(whole, abs=40)
    assert json.loads(page.run("JSON.stringify(anykCompute({scores: [2, 1, 0], target: 1, pK: [0, 1]}).T[1].length)")) == 2
