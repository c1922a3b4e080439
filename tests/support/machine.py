"""On import: an environment that is the same on every machine: offline, one thread, no GPU, and a home of its own.

To be imported before all libraries that read the environment when they are imported.
"""

import atexit
import os
import shutil
import sys
import tempfile

LEFT_BEHIND = (
    # Launchers and schedulers: the tests may be started within a job.
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "ROLE_", "MASTER_", "TORCHELASTIC_",
    "ACCELERATE_", "FSDP_", "PMI_", "PMIX_", "OMPI_", "MV2_", "SLURM_", "SUBMITIT_", "GLOO_",
    # Libraries, and trackers that report.
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TORCHDYNAMO_", "TORCH_COMPILE", "TORCH_LOGS", "USE_TORCH_XLA", "PJRT_", "DS_",
    "WANDB_", "MLFLOW_", "TRACKIO_", "TENSORBOARD_", "COMET_",
    # The Hub of the tests is on this machine; some proxies need packages that are not there.
    *(f"{kind}_proxy" for kind in ("http", "https", "all", "no")), *(f"{kind}_PROXY" for kind in ("HTTP", "HTTPS", "ALL", "NO")),
)  # fmt: skip
"""What the shell, a launcher or an earlier run left in the environment says nothing about the runs of the tests."""

KEPT = ("HF_CGD_TEST_HOME", "HF_CGD_SAME_MACHINE")
"""What is for the tests themselves."""

THREADS = 1
"""The networks are tiny: more would not be faster, and would take the cores of the other workers of `pytest -n`."""

if "HF_CGD_TEST_HOME" not in os.environ:
    for name in [name for name in os.environ if name.startswith(LEFT_BEHIND) and name not in KEPT]:
        del os.environ[name]
    # The workers of `pytest -n` share the folder of the process that starts them.
    os.environ["HF_CGD_TEST_HOME"] = tempfile.mkdtemp(prefix="hf_cgd_tests_")
    atexit.register(shutil.rmtree, os.environ["HF_CGD_TEST_HOME"], ignore_errors=True)

os.environ.update(
    HF_HOME=os.environ["HF_CGD_TEST_HOME"], HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
    CUDA_VISIBLE_DEVICES="", MPLBACKEND="agg", OMP_NUM_THREADS=str(THREADS), MKL_NUM_THREADS=str(THREADS), COLUMNS="80",
    PYTHONIOENCODING="utf-8",
)  # fmt: skip

# wilds asks the package index for its newest version when it is imported: in a thread, without a limit of time, which
# the end of the program waits for, and whose warnings come up in whatever test is running.
sys.modules["outdated"] = None  # type: ignore[assignment]
