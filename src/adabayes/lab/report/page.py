"""Pages that open from disk and need no network: single files with their style, script, data and Plotly."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from adabayes._util.missing_extra import missing_extra
from adabayes.lab.run.folder import write_atomically

__all__ = ["write"]


def write(name: str, title: str, content: dict[str, Any], path: Path) -> Path:
    """Write the page made of ``web/NAME.html`` and ``web/NAME.js``, whose script gets ``content``; return its path."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise missing_extra("pages need Plotly", "lab") from error
    parts = {
        "TITLE": html.escape(title),
        "STYLE": _resource("page.css"),
        "BODY": _resource(f"{name}.html"),
        "PLOTLY": get_plotlyjs(),
        "DATA": json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "COMMON": _resource("page.js"),
        "SCRIPT": _resource(f"{name}.js"),
    }
    page = re.sub(r"/\*([A-Z]+)\*/", lambda mark: parts[mark[1]], _resource("page.html"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page.encode(errors="backslashreplace"))
    return path


def _resource(name: str) -> str:
    return (resources.files("adabayes.lab.report") / "web" / name).read_text(encoding="utf-8")
