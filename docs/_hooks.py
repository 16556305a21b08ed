"""mkdocs: pages from READMEs and notebooks outside docs/, and links that hold on the site as in the repository.

A notebook is shown as it is stored, outputs included; nothing is run.

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
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[1]
READMES = {
    "README.md": "index.md",
    "checkpoints/README.md": "checkpoints.md",
    **{f"models/{name}/README.md": f"models/{name}.md" for name in ("zamba2", "kimi_linear", "deepseek_v4", "flux2")},
}
NOTEBOOKS = {f"notebooks/{name}.ipynb": f"notebooks/{name}.md" for name in ("text", "pictures", "quantize", "slow")}
PAGES = {**READMES, **NOTEBOOKS}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in READMES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for source, page in NOTEBOOKS.items():
        name = posixpath.splitext(page)[0]
        pictures = {"output_files_dir": posixpath.basename(name)}
        text, made = MarkdownExporter().from_filename(str(ROOT / source), resources=pictures)
        text = text.replace("![png]", "![what the cell above draws]")
        files.append(File.generated(config, page, content=text))
        for picture, data in made["outputs"].items():
            files.append(File.generated(config, f"notebooks/{picture}", content=data))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    uri = page.file.src_uri
    source = next((source for source, target in PAGES.items() if target == uri), f"docs/{uri}")

    def rewritten(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        # Pictures of notebooks are files of the site alone.
        on_site = path.removeprefix("docs/") if path.startswith(("docs/", "notebooks/")) else None
        where = PAGES.get(path, on_site)
        if where is not None and files.get_file_from_path(where) is not None:
            link = posixpath.relpath(where, posixpath.dirname(uri) or ".")
            return f"{image}[{text}]({link}{anchor or ''})"
        if not (ROOT / path).exists():
            raise PluginError(f"{source}: a link leads to {target}, which does not exist")
        return f"{text} (`{path}`)" if text.strip("`") != path else f"`{path}`"

    return _LINK.sub(rewritten, markdown)
