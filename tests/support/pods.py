"""What Kubernetes does with the objects of a manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def object_of(manifest: dict[str, Any], kind: str) -> dict[str, Any]:
    """The only object of a kind."""
    (found,) = (one for one in manifest["items"] if one["kind"] == kind)
    assert isinstance(found, dict)
    return found


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The container of the Job's pods."""
    found: dict[str, Any] = object_of(manifest, "Job")["spec"]["template"]["spec"]["containers"][0]
    return found


def expanded(word: str, environment: Mapping[str, str]) -> str:
    """A word of a container's command as Kubernetes expands it: $(NAME) of the environment, $$ for a dollar."""
    return re.sub(
        r"\$\$|\$\(([A-Z_]+)\)",
        lambda found: "$" if found[0] == "$$" else environment.get(found[1], found[0]),
        word,
    )
