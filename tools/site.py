"""This script lays the pages out for MkDocs (`make docs`) in the repository's own folders, so that the same links hold in both."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build" / "site-source"
PAGES = (
    "*.md",
    "docs/*.md",
    "docs/adr/*.md",
    "helm/*/*.md",
    "k8s/*.md",
    "k8s/gitops/*.md",
    "k8s/cluster/values/*/*.md",
    "examples/*.md",
)
FILES = ("LICENSE", "docs/figures/*", "docs/site.css", "docs/openapi.json", "serve_app/ui/mark.svg")
_OUTSIDE_WORDS = re.compile(r"[^\w\- ]")


def github_anchor(title: str, separator: str) -> str:
    """Return a heading's anchor as Git hosts make it, so that links to headings work there and here."""
    return _OUTSIDE_WORDS.sub("", title.strip().lower()).replace(" ", separator)


def sources() -> Iterator[Path]:
    """Yield the files of the site, relative to the repository."""
    for pattern in (*PAGES, *FILES):
        yield from (path.relative_to(ROOT) for path in sorted(ROOT.glob(pattern)))


def main() -> None:
    """Write the folder that mkdocs.yml names."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for path in sources():
        (SOURCE / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, SOURCE / path)


if __name__ == "__main__":
    main()
