"""Settings that come before any import of the tests; what they share is in testkit/."""

import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RLHFUSE_LIBRARY", "")  # no search begins with what another has found
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on CPU tensors; read when a kernel is defined
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|transformer_engine).*")

pytest_plugins = ["testkit.plugin"]
