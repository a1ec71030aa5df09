"""Gives a process the compiler of torch, which process groups need, and `children/sitecustomize.py` replaces."""

from __future__ import annotations

import sys

import torch

sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != "WithoutCompiler"]
sys.modules.pop("torch._dynamo", None)
vars(torch).pop("_dynamo", None)
