"""The manifest for Kubernetes: no value becomes syntax, and pods have no rights that they don't need."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flockstep.cli.app import run
from support.pods import container_of, object_of

EVIL = [
    "name: value",
    "two\nlines",
    "ends in a line\n",
    "x\n---\nkind: Secret",
    "\n  hostNetwork: true",
    " #  no comment",
    "\x1b[2J",
    "*anchor",
]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, dict[str, Any]]:
    assert run(["manifest", "--image", "reg.example/a: b\nc", "--claim", "records", "launch", "train.py", *words]) == 0
    text = capsys.readouterr().out
    return text, json.loads(text)


def test_words_with_colons_and_lines_stay_values(capsys: pytest.CaptureFixture[str]) -> None:
    """The text is JSON, which is YAML too, so a reader of either finds the same."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    text, document = printed(capsys, *EVIL)
    container = container_of(document)
    assert container["args"][-len(EVIL) :] == EVIL
    assert container["image"] == "reg.example/a: b\nc"
    assert list(yaml.safe_load_all(text)) == [document]


def test_pods_have_no_rights_that_they_do_not_need(capsys: pytest.CaptureFixture[str]) -> None:
    pod = object_of(printed(capsys)[1], "Job")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
