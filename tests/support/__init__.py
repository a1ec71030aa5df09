"""What several test files share. Numerical libraries use one thread here: several processes share the cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy and torch are imported
