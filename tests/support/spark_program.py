"""A program that trains on Spark's `local-cluster[2,1,1024]`: two executors with one core each, on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from support.processes import RealRun

MISSING = (
    "pyspark is not installed"
    if importlib.util.find_spec("pyspark") is None
    else "Java is not installed"
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ
    else ""
)
needs_spark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
BEGIN = """
import json, os, sys
place = os.environ["TMPDIR"]
os.environ.update(
    PYSPARK_PYTHON=sys.executable, SPARK_WORKER_DIR=place + "/work", SPARK_LOCAL_DIRS=place + "/local",
    SPARK_LOCAL_IP="127.0.0.1",
)
import numpy as np
from pyspark.sql import SparkSession
import flockstep
from flockstep.errors import FlockstepError
from flockstep.workloads.softmax import Softmax

settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.log.level": "OFF"}
session = SparkSession.builder.master("local-cluster[2,1,1024]").config(map=settings).getOrCreate()
data = Softmax().job(0).data()
pairs = [(x.tolist(), int(y)) for x, y in zip(data.train_x, data.train_y)]

def rows(*sizes):
    '''An RDD of pairs with partitions of these sizes.'''
    ends = np.cumsum(sizes).tolist()
    parts = [pairs[end - size : end] for end, size in zip(ends, sizes)]
    return session.sparkContext.parallelize(parts, len(parts)).flatMap(lambda part: part)

def train(given, strategy, name, **more):
    return flockstep.on_spark(given, "softmax", strategy, seed=1, out=sys.argv[3] + name, **more)
"""
END = """
session.stop()
raise SystemExit(0)
"""


def spark_program(text: str, record: Path) -> RealRun:
    """Run a program that begins with a session, and with the functions `rows` and `train`; records are named
    `record` and a suffix.
    """
    return RealRun(["program"], record, before=BEGIN + text + END, afresh=True)
