"""Gives the site the files of the repository at their own places, so that a link is the same in both."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
SHOWN = ("*.md", "LICENSE", "docs/**/*", "examples/**/*.*", "benchmarks/**/*.md", "benchmarks/results/*")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Returns the files of the theme, and of ours those that pages show or link to."""
    theirs = [file for file in files if file.src_dir != config.docs_dir]
    paths = {path for pattern in SHOWN for path in ROOT.glob(pattern) if path.is_file()}
    ours = [str(path.relative_to(ROOT)) for path in sorted(paths) if path.suffix != ".pyc"]
    return Files([*theirs, *(File(path, str(ROOT), config.site_dir, True) for path in ours)])
