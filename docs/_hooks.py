"""mkdocs: pages from READMEs outside docs/, and links that hold on the site as they do in the repository.

A link to another page leads there, one to a file that is no page becomes the file's path as text, and one to what does
not exist fails the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
READMES = {
    "README.md": "index.md",
    "checkpoints/README.md": "checkpoints.md",
    **{f"models/{name}/README.md": f"models/{name}.md" for name in ("zamba2", "kimi_linear", "deepseek_v4", "flux2")},
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in READMES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    uri = page.file.src_uri
    source = next((source for source, target in READMES.items() if target == uri), f"docs/{uri}")

    def rewritten(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        where = READMES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if where is not None and files.get_file_from_path(where) is not None:
            link = posixpath.relpath(where, posixpath.dirname(uri) or ".")
            return f"{image}[{text}]({link}{anchor or ''})"
        if not (ROOT / path).exists():
            raise PluginError(f"{source}: a link leads to {target}, which does not exist")
        return f"{text} (`{path}`)" if text.strip("`") != path else f"`{path}`"

    return _LINK.sub(rewritten, markdown)
