"""The files in recipes/accelerate say to `accelerate launch` what their names say."""

from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from paths import RECIPES

FOLDER = RECIPES / "accelerate"
EXPECTED = {
    "cpu-2proc": DistributedType.MULTI_GPU,
    "multi-gpu": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "deepspeed-zero2": DistributedType.DEEPSPEED,
    "deepspeed-zero3": DistributedType.DEEPSPEED,
    "tpu": DistributedType.XLA,
}


def launch_arguments(name: str) -> Any:
    command = ["--config_file", str(FOLDER / f"{name}.yaml"), "script.py"]
    arguments, config, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    arguments.deepspeed_fields_from_accelerate_config = ",".join(config.deepspeed_config)
    return arguments


def test_each_file_is_loaded_as_what_it_is_named_for() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(EXPECTED)
    for name, kind in EXPECTED.items():
        config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
        assert config.distributed_type == kind and config.main_training_function == "main"
        assert config.num_processes > 1 and config.use_cpu is False


def test_the_launcher_of_several_processes_is_picked() -> None:
    """With what one might write in place of it, one process starts and nothing says so."""
    assert launch_arguments("cpu-2proc").multi_gpu and launch_arguments("cpu-2proc").num_processes == 2
    assert launch_arguments("multi-gpu").multi_gpu
    assert launch_arguments("tpu").tpu and launch_arguments("tpu").num_processes == 8


def test_fsdp2_reaches_the_processes() -> None:
    environment = prepare_multi_gpu_env(launch_arguments("fsdp2"))
    assert environment["ACCELERATE_USE_FSDP"] == "true" and environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert environment["FSDP_RESHARD_AFTER_FORWARD"] == "true" and environment["FSDP_OFFLOAD_PARAMS"] == "false"


@pytest.mark.parametrize("stage", [2, 3])
def test_the_stage_of_deepspeed_reaches_the_processes(stage: int) -> None:
    _, environment = prepare_deepspeed_cmd_env(launch_arguments(f"deepspeed-zero{stage}"))
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == str(stage)
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"] == "none"
