"""This module checks where the configuration says that weights and adapters are, and names what people write in that place.

The tables `MODEL_FORMS` and `FOLDER_FORMS` are also the Helm chart's (helm/serve-app/files/rules.yaml), so `serve-app check` and the chart
refuse the same texts by the same sentence. Their patterns mean the same to Python and to Go.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from serve_app.config.checks import shown, wrong

FETCH = "fetch it, and give the folder's absolute path; on Kubernetes the Helm chart's weights.downloads fetches it, from s3:// or hf:"
"""The way out for weights and adapters that are not on this machine."""


class Form(NamedTuple):
    """A form of text: the words behind "is TEXT", "" for a right form, and the way out. Of a table, the first row that matches counts."""

    pattern: str
    problem: str = ""
    hint: str = ""


_RELATIVE = Form(r"^[.~]", ", a relative path", "write it from /: replicas have other working directories")
MODEL_FORMS = (
    Form(r"^\s|\s$", ", with blanks around it", "remove them"),
    Form(r"\$\{?[A-Za-z0-9_]", ", and no variable is filled in here", "write the value itself"),
    Form(r"^[A-Za-z]:[\\/]|\\", ", a path of Windows", "replicas run on Linux: give an absolute path there"),
    Form(r"^hf:", ", in the form of the chart's weights.downloads", f"write the id alone, without hf:; or {FETCH}"),
    Form(r"^https?://", ", and weights are not fetched from a web page", f"give the id ORG/NAME; or {FETCH}"),
    Form(
        r"^simulated:",
        ", but an accelerator is simulated, not its weights",
        "set models.NAME.simulated: {profile: h100-llama-8b}, and here embedded:smollm2-135m-instruct for its tokenizer",
    ),
    Form(r"^[A-Za-z][A-Za-z0-9+.-]+:/", ", and serve-app reads no object store", FETCH),
    _RELATIVE,
    Form(r"^(/|embedded:|[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?(:[A-Za-z0-9_.-]+)?$)"),
    Form("", ", neither a Hugging Face id (ORG/NAME) nor an absolute path", "a path begins with /"),
)
"""What may stand in `models.NAME.model`: an embedded model, an absolute path, or a Hugging Face id."""
FOLDER_FORMS = (Form("^/"), _RELATIVE, Form("", ", not the absolute path of a folder", FETCH))
"""What may stand in the path of an adapter."""


def checked_model(model: str) -> str:
    return _checked(model, MODEL_FORMS)


def checked_folder(path: Any) -> Any:
    """Check the path before pydantic makes a `Path` of it, which would show s3://bucket as s3:/bucket."""
    return _checked(path, FOLDER_FORMS) if isinstance(path, str) else path


def _checked(text: str, forms: Sequence[Form]) -> str:
    form = next(form for form in forms if re.search(form.pattern, text))
    if form.problem:
        raise wrong("", f"is {shown(text)}{form.problem}", form.hint)
    return text
