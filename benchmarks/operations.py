"""How many operations a training step calls: on a GPU each is a kernel to launch, whatever the size of the network.

    python benchmarks/operations.py                                  the table
    python benchmarks/operations.py --where "cgd" --settings text    which lines of ours call them, one step of CGD

A network of real depth and tiny width trains on the CPU, which poses as a device: statistics stay on it and no value
is read. What is counted is forward and backward pass with the loss, without the optimizer. Views and fresh memory
launch nothing and are left out. One `torch._foreach` call counts once where its tensors lie densely in memory. What
operations do inside of themselves (the kernels of an attention, say) is not seen, and no times are told by this.
"""

import argparse
import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers as tf
from step_time import METHODS, Setting, Steps, timm_model
from torch.utils._python_dispatch import TorchDispatchMode

import hf_cgd
from hf_cgd.arithmetic import DeviceArithmetic
from hf_cgd.trainer.host_ids import HOST_IDS

WITHOUT_KERNEL = {"detach", "_unsafe_view", "lift_fresh", "set_", "_local_scalar_dense", "resize_"}
"""Operations besides views that launch nothing, or only read."""
PACKAGE = str(Path(hf_cgd.__file__).parent)


@dataclass
class Operations(TorchDispatchMode):
    """Counts operations that would launch a kernel, by name and by the line of the package that calls them."""

    by_name: Counter[str] = field(default_factory=Counter)
    by_line: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def total(self) -> int:
        return self.by_name.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (func.is_view or name in WITHOUT_KERNEL or "empty" in name):
            launches = _launches(args[0]) if name.startswith("_foreach") else 1
            self.by_name[name] += launches
            self.by_line[_line_of_the_package()] += launches
        return func(*args, **(kwargs or {}))


def _launches(tensors: Any) -> int:
    """Those of a `torch._foreach` call: one, but one for each of its tensors where some have gaps in memory."""
    dense = all(torch.empty_like(tensor).stride() == tensor.stride() for tensor in tensors)
    return 1 if dense else len(tensors)


def _line_of_the_package() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return "the network" if frame is None else f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}"


@contextlib.contextmanager
def posing_as_device() -> Iterator[None]:
    """Within, the CPU is taken for a device whose values are not to be looked at."""
    with contextlib.ExitStack() as stack:
        on_device = lambda device: DeviceArithmetic(device, fixed_shapes=False)  # noqa: E731
        stack.enter_context(mock.patch("hf_cgd.trainer.engine_choice.arithmetic_on", on_device))
        for name, module in list(sys.modules.items()):
            if name.startswith("hf_cgd.") and hasattr(module, "is_on_host"):
                stack.enter_context(mock.patch.object(module, "is_on_host", lambda tensor: False))
        yield


def operations_of(steps: Steps, method: str) -> Operations:
    """Those of a later step of a method, since the first ones check the engine; "stock" is the plain Trainer's."""
    counted = Operations()
    with posing_as_device(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = steps.erm if method == "stock" else steps.method(method)
        for _ in range(5):
            step()
        with counted:
            step()
    return counted


def text(layers: int = 6) -> Any:
    """DistilBERT at a twelfth of its width."""
    config = tf.DistilBertConfig(vocab_size=500, dim=64, hidden_dim=256, n_layers=layers, n_heads=4, num_labels=2)
    return tf.DistilBertForSequenceClassification(config)


def settings() -> dict[str, tuple[Setting, dict[str, Any]]]:
    """Each with options of the trainer."""
    sentence = Setting(text, 48, 4, 4, tokens=16, vocabulary=500)
    return {
        "text": (sentence, {}),
        "text, bf16": (sentence, {"bf16": True}),
        "text, uneven groups": (Setting(text, 46, 4, 4, tokens=16, vocabulary=500), {}),
        "text, K = 24": (Setting(text, 48, 24, 24, tokens=16, vocabulary=500), {}),
        "text, 4 of 1,000": (Setting(text, 48, 1000, 4, tokens=16, vocabulary=500), {}),
        "convolutions": (Setting(lambda: timm_model("test_convnext"), 16, 4, 4, pixels=64), {}),
        "ResNet": (Setting(lambda: timm_model("test_resnet"), 16, 4, 4, pixels=64), {}),
    }


def steps_of(setting: Setting, options: dict[str, Any]) -> Steps:
    """Steps whose group ids are on the host, as beside a device."""
    steps = Steps(setting, **options)
    steps.on_host = {HOST_IDS: steps.group_ids.numpy()}
    return steps


def main() -> None:
    methods = ["erm", "group_dro", "cgd", "cgd sketch", "cgd head", "cgd per_group"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=list(settings()), choices=list(settings()))
    parser.add_argument("--methods", nargs="+", default=methods, choices=list(METHODS))
    parser.add_argument("--where", choices=list(METHODS), help="list the lines of the package that call most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    if options.where is None:
        print("| operations of a step | stock |", " | ".join(options.methods), "|")
        print("| --- | ---: |", " | ".join("---:" for _ in options.methods), "|")
    for name in options.settings:
        if options.where is not None:
            found = operations_of(steps_of(*settings()[name]), options.where)
            print(f"{name}: {found.total} operations")
            for counts in (found.by_line, found.by_name):
                print("\n".join(f"{count:6} {what}" for what, count in counts.most_common(30)), end="\n\n")
            continue
        cells = []
        for method in ("stock", *options.methods):
            try:
                cells.append(str(operations_of(steps_of(*settings()[name]), method).total))
            except ValueError:
                cells.append("refused")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
