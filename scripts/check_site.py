"""Fail if a built page would make a browser load something from another host.

Usage: python scripts/check_site.py build/site
"""

import re
import sys
from pathlib import Path

# What a browser fetches by itself; ordinary <a href> links are the reader's own decision.
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=["']?(?P<source>(?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon|modulepreload))"""
    r"""[^>]*?\bhref=["']?(?P<link>(?:https?:)?//[^"'\s>]+)"""
    r"""|(?:url\(|@import\s+)["']?(?P<style>(?:https?:)?//[^"')\s]+)"""
)


def main(site: Path) -> int:
    pages = sorted(p for p in site.rglob("*") if p.suffix in {".html", ".css"})
    if not any(p.suffix == ".html" for p in pages):
        print(f"{site}: no pages found; build them with `mkdocs build --strict`", file=sys.stderr)
        return 1
    found = [
        f"{page}: loads {match[match.lastgroup or 0]}"
        for page in pages
        for match in _LOADED.finditer(page.read_text(encoding="utf-8"))
    ]
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(pages)} pages and style sheets read, {len(found)} loads from other hosts")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
