"""What MkDocs is told beyond its settings: pages that are made, and links that leave docs/."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from website import pages, pictures

ROOT = Path(__file__).parents[1]
NOTES = tuple(
    str(path.relative_to(ROOT)) for room in ("bench", "experiments") for path in sorted((ROOT / room / "notes").glob("*.md"))
)
DOCUMENTS = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "native/wire/wire.md", *NOTES)
LINK = re.compile(r"\]\((?!\w+:|#)([^)\s]+?)(#[^)\s]*)?\)")


EXAMPLES = tuple(sorted((ROOT / "examples").glob("*.py")))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the made pages into the navigation, where it has their folder."""
    of_folder = {
        "policies/": [{"All": "policies/index.md"}, *({name: f"policies/{name}.md"} for name in pages.policy_names())],
        "examples/": [{path.name: f"examples/{path.stem}.md"} for path in EXAMPLES],
        "notes/": [{Path(name).stem: name} for name in NOTES],
    }
    config.nav = [
        {title: of_folder.get(place, place) if isinstance(place, str) else place}
        for entry in config.nav or ()
        for title, place in entry.items()
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made: dict[str, str] = {name: (ROOT / name).read_text() for name in DOCUMENTS}
    others = (*ROOT.glob("*/notes/**/*.svg"), *ROOT.glob("examples/*.json"))
    made |= {str(path.relative_to(ROOT)): path.read_text() for path in others}
    made |= {f"examples/{path.stem}.md": f"# {path.name}\n\n```python\n{path.read_text()}```\n" for path in EXAMPLES}
    made |= {f"policies/{name}.md": pages.policy(name) for name in pages.policy_names()}
    made |= {f"pictures/policy-{name}.svg": pictures.of_policy(name) for name in pages.policy_names()}
    made |= {
        "policies/index.md": pages.overview(),
        "reference/commands.md": pages.commands(),
        "reference/python.md": pages.python(),
    }
    for place, content in made.items():
        files.append(File.generated(config, place, content=content))
    return files


NAMELESS = {
    '<div class="md-search" data-md-component="search" role="dialog"': 'aria-label="Search"',
    '<input class="md-toggle" data-md-toggle="drawer"': 'aria-label="Navigation"',
    '<input class="md-toggle" data-md-toggle="search"': 'aria-label="Search"',
}


def on_post_template(output: str, **_: Any) -> str:
    return _named(output)


def on_post_page(output: str, **_: Any) -> str:
    return _named(output)


def _named(output: str) -> str:
    """Give names to the elements of Material that a screen reader needs them of."""
    for element, name in NAMELESS.items():
        output = output.replace(element, f"{element} {name}")
    return output


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Let links of files in the repository lead to their pages."""
    here = page.file.src_uri
    folder = os.path.dirname(here)
    in_repository = folder if here in DOCUMENTS else os.path.join("docs", folder)

    def led(found: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(in_repository, found[1]))
        if target.startswith("examples/") and target.endswith(".py"):
            target = f"{target.removesuffix('.py')}.md"
        return f"]({os.path.relpath(target.removeprefix('docs/'), folder or '.')}{found[2] or ''})"

    return LINK.sub(led, markdown)
