"""On import: an environment that is the same on every machine: offline, one thread, no GPU, and a home of its own.

To be imported before all libraries that read the environment when they are imported.
"""

import atexit
import os
import shutil
import tempfile

LEFT_BEHIND = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "MASTER_",
    "ACCELERATE_",
    "FSDP_",
    "PMI_",
    "OMPI_",
    "HF_",
    "HUGGINGFACE_",
)
"""What the shell, a launcher or an earlier run left in the environment says nothing about the runs of the tests."""

THREADS = 1
"""The networks are tiny: more would not be faster, and would take the cores of the other workers of `pytest -n`."""

if "HF_CGD_TEST_HOME" not in os.environ:
    for name in [name for name in os.environ if name.startswith(LEFT_BEHIND) and not name.startswith("HF_CGD_")]:
        del os.environ[name]
    # The workers of `pytest -n` share the folder of the process that starts them.
    os.environ["HF_CGD_TEST_HOME"] = tempfile.mkdtemp(prefix="hf_cgd_tests_")
    atexit.register(shutil.rmtree, os.environ["HF_CGD_TEST_HOME"], ignore_errors=True)

os.environ.update(
    HF_HOME=os.environ["HF_CGD_TEST_HOME"], HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
    CUDA_VISIBLE_DEVICES="", MPLBACKEND="agg", OMP_NUM_THREADS=str(THREADS),
)  # fmt: skip
