"""For the tests and the doctests alike: what is measured while testing must not end up in the user's own cache."""

import atexit
import os
import shutil
import tempfile

if "SUBQUAD_CACHE" not in os.environ:
    os.environ["SUBQUAD_CACHE"] = tempfile.mkdtemp(prefix="subquad-cache-")
    atexit.register(shutil.rmtree, os.environ["SUBQUAD_CACHE"], ignore_errors=True)

# Importing these for their doctests would need Triton; tests/kernels/triton_interpreted.py imports them where it is.
collect_ignore_glob = ["src/subquad/kernels/experimental/triton/[!_]*.py"]
