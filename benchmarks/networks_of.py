"""Tiny networks of many families, for benchmarks/networks.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
import torch
import torchvision.models as tv
import transformers
from timm.models import convmixer, focalnet, metaformer, mlp_mixer
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer
from transformers.models.auto import modeling_auto

CLASSES = 3
TOKENS = 7


@dataclass
class Network:
    """A network with what it is fed.

    Attributes:
        model: takes what `inputs` gives.
        size: side of its images; 0 for a text model, which takes token ids.
        channels: of the images.
        end: id of the last token, None for any.
    """

    model: nn.Module
    size: int = 0
    channels: int = 3
    end: int | None = None

    def inputs(self, generator: torch.Generator, batch: int) -> dict[str, Tensor] | Tensor:
        """A batch of noise."""
        if self.size:
            shape = (batch, self.channels, self.size, self.size)
            return torch.randn(shape, generator=generator, dtype=torch.float64)
        ids = torch.randint(5, 63, (batch, TOKENS), generator=generator)
        if self.end is not None:
            ids[:, -1] = self.end
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def logits(self, model: nn.Module, inputs: Any) -> Tensor:
        """Class scores [B, classes] in float64."""
        outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        outputs = outputs if isinstance(outputs, Tensor) else outputs.logits
        return outputs.double()


# ---- transformers: any configuration, made small --------------------------------------------------------------------

SMALL = {
    "vocab_size": 64, "hidden_size": 16, "d_model": 16, "dim": 16, "n_embd": 16, "emb_dim": 16, "embed_dim": 16,
    "embedding_size": 16, "input_embedding_size": 16, "output_embedding_size": 16, "word_embed_proj_dim": 16,
    "num_hidden_layers": 3, "n_layer": 3, "n_layers": 3, "num_layers": 2, "num_decoder_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_attention_heads": 2, "n_head": 2, "n_heads": 2, "num_heads": 2, "num_key_value_heads": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "head_dim": 8, "d_kv": 8, "d_head": 8,
    "kv_channels": 8,
    "intermediate_size": 32, "ffn_dim": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_ff": 32, "d_inner": 32,
    "hidden_dim": 32, "n_inner": 32, "dff": 32, "max_position_embeddings": 48, "n_positions": 48, "max_seq_len": 48,
    "image_size": 32, "patch_size": 8, "num_local_experts": 2, "n_routed_experts": 4, "num_experts": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
    "true_hidden_size": 16,
    "intra_bottleneck_size": 16, "num_landmarks": 2, "segment_means_seq_len": 7, "attention_window": 4,
    "num_labels": CLASSES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
    "sep_token_id": 2,
    "decoder_start_token_id": 0, "sliding_window": 8, "mask_token_id": 3, "num_experts_per_tok": 1, "rotary_dim": 4,
}  # fmt: skip
WIDTHS = {"hidden_sizes", "embed_dims", "neck_hidden_sizes", "dims"}
ONES = {"depths", "depth", "block_sizes", "num_blocks", "layer_depths"}
OVERRIDES: dict[str, dict[str, Any]] = {
    "beit": {"use_mean_pooling": True, "use_relative_position_bias": True},
    "data2vec-vision": {"use_mean_pooling": True, "use_relative_position_bias": True},
    "funnel": {"block_sizes": [1, 1, 1], "block_repeats": [1, 1, 1]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "swin": {"patch_size": 2, "embed_dim": 8, "depths": [1] * 4, "num_heads": [1, 1, 2, 2], "window_size": 2},
    "swinv2": {"patch_size": 2, "embed_dim": 8, "depths": [1] * 4, "num_heads": [1, 1, 2, 2], "window_size": 2},
    "donut-swin": {"patch_size": 2, "embed_dim": 8, "depths": [1] * 4, "num_heads": [1, 1, 2, 2], "window_size": 2},
    "focalnet": {"patch_size": 4, "embed_dim": 8, "depths": [1, 1], "hidden_sizes": [8, 16], "focal_levels": [1, 1],
                 "focal_windows": [3, 3], "use_layerscale": True},
    "lilt": {"channel_shrink_ratio": 2},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "layer_type": "basic"},
    "bit": {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "num_groups": 4},
    "poolformer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4},
    "cvt": {"embed_dim": [8, 8, 16], "num_heads": [1, 1, 2], "depth": [1, 1, 2]},
    "segformer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "num_attention_heads": [1, 1, 2, 2]},
    "pvt": {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "num_attention_heads": [1, 1, 2, 2]},
    "pvt_v2": {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "num_attention_heads": [1, 1, 2, 2]},
    "convnext": {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "drop_path_rate": 0.2},
    "convnextv2": {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4},
    "levit": {"image_size": 64, "patch_size": 16},
    "squeezebert": {f"{name}_groups": 1 for name in ("q", "k", "v", "post_attention", "intermediate", "output")},
    "perceiver": {"num_latents": 4, "d_latents": 16, "d_model": 16, "num_blocks": 1, "num_self_attends_per_block": 2},
    "canine": {"downsampling_rate": 2, "upsampling_kernel_size": 2, "num_hash_buckets": 64},
    "gpt_neo": {"attention_types": [[["global"], 3]], "window_size": 4},
    "mobilebert": {"trigram_input": True},
}  # fmt: skip


def _small_config(kind: str) -> transformers.PreTrainedConfig:
    """The configuration of a model type with all that tells its size made small, by name."""
    config_class = transformers.CONFIG_MAPPING[kind]
    changes: dict[str, Any] = {}
    default = config_class()
    for name, value in default.to_dict().items():
        if isinstance(value, (list, tuple)) and value and all(isinstance(part, int) for part in value):
            if name in WIDTHS:
                changes[name] = [8 * (2 ** min(place, 1)) for place in range(len(value))]
            elif name in ONES:
                changes[name] = [1] * len(value)
        elif name in SMALL and not isinstance(value, (list, tuple, dict)) and not isinstance(value, bool):
            changes[name] = SMALL[name]
    changes |= {name: SMALL[name] for name in ("num_labels", "pad_token_id")}
    own = set(default.to_dict()) | set(getattr(default, "attribute_map", {}))
    changes |= {name: value for name, value in SMALL.items() if name in getattr(default, "attribute_map", {})}
    changes |= {name: value for name, value in OVERRIDES.get(kind, {}).items() if name in own}
    return config_class(**changes)


def _from_transformers(kind: str, auto: Any) -> Network:
    config = _small_config(kind)
    if getattr(config, "is_encoder_decoder", False) and not hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = 0
    model = auto.from_config(config, attn_implementation="eager")
    text = auto is transformers.AutoModelForSequenceClassification
    size = 0 if text else getattr(config, "image_size", 32)
    size = size if isinstance(size, int) else size[0]
    encodes_twice = getattr(config, "is_encoder_decoder", False)
    return Network(
        model, size or 0, getattr(config, "num_channels", 3), config.eos_token_id if encodes_twice else None
    )


def _transformers(names: Mapping[str, str], auto: Any) -> dict[str, Callable[[], Network]]:
    return {kind: partial(_from_transformers, kind, auto) for kind in names}


def text() -> dict[str, Callable[[], Network]]:
    names = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    return _transformers(names, transformers.AutoModelForSequenceClassification)


def vision() -> dict[str, Callable[[], Network]]:
    names = modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    return _transformers(names, transformers.AutoModelForImageClassification)


# ---- timm and torchvision -------------------------------------------------------------------------------------------

VIT = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 32, "num_heads": 2}
TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "test_vit": (32, {"img_size": 32}), "test_vit3": (32, {"img_size": 32, "global_pool": "map"}),
    "test_convnext": (32, {}), "test_nfnet": (32, {}), "test_mambaout": (32, {}), "test_resnet": (32, {}),
    "test_efficientnet": (32, {}), "test_efficientnet_gn": (32, {}), "test_efficientnet_evos": (32, {}),
    "test_byobnet": (32, {}),
    "vit_tiny_patch16_224": (32, {**VIT, "drop_path_rate": 0.2}), "deit3_small_patch16_224": (32, VIT),
    "beit_base_patch16_224": (32, VIT), "beitv2_base_patch16_224": (32, VIT), "eva02_tiny_patch14_224": (32, VIT),
    "vit_small_patch16_dinov3": (32, VIT), "vit_small_patch14_reg4_dinov2": (32, VIT),
    "cait_xxs24_224": (32, VIT), "xcit_nano_12_p16_224": (32, {**VIT, "patch_size": 8}),
    "swin_tiny_patch4_window7_224": (
        64, {"img_size": 64, "embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "window_size": 2}),
    "swinv2_tiny_window8_256": (
        64, {"img_size": 64, "embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "window_size": 2}),
    "convnext_atto": (32, {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16), "drop_path_rate": 0.2}),
    "pvt_v2_b0": (32, {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16), "num_heads": (1, 1, 2, 2)}),
    "hiera_tiny_224": (64, {"img_size": (64, 64), "embed_dim": 8, "stages": (1, 1, 1, 1)}),
    "efficientvit_b0": (32, {}), "mobilenetv3_small_050": (32, {}), "mobilenetv4_conv_small_035": (32, {}),
    "lcnet_035": (32, {}), "mnasnet_small": (32, {}), "ghostnet_050": (32, {}), "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}), "edgenext_xx_small": (64, {}), "repvit_m0_9": (32, {"embed_dim": (8, 8, 16, 16)}),
    "regnetx_002": (32, {}), "semnasnet_050": (32, {}), "starnet_s050": (32, {}), "dla46x_c": (32, {}),
    "coat_lite_tiny": (32, {"img_size": 32, "embed_dims": [8, 8, 16, 16], "serial_depths": [1, 1, 1, 1]}),
    "volo_d1_224": (
        32, {"img_size": 32, "layers": (1, 1, 1, 1), "embed_dims": (16, 16, 16, 16), "num_heads": (2, 2, 2, 2)}),
    "visformer_tiny": (64, {"img_size": 64, "embed_dim": 32, "depth": (1, 1, 1)}),
    "vitamin_small_224": (64, {"img_size": 64, "depth": 2, "embed_dim": 32, "num_heads": 2}),
}  # fmt: skip


MLP = {"img_size": 32, "patch_size": 8, "num_blocks": 3, "embed_dim": 32}
OF_CLASS: dict[str, Callable[..., nn.Module]] = {
    "mlp-mixer": partial(mlp_mixer.MlpMixer, **MLP),
    "resmlp": partial(
        mlp_mixer.MlpMixer, **MLP, mlp_ratio=4, block_layer=mlp_mixer.ResBlock, norm_layer=mlp_mixer.Affine
    ),
    "gmlp": partial(
        mlp_mixer.MlpMixer, **MLP, mlp_ratio=6, block_layer=mlp_mixer.SpatialGatingBlock, mlp_layer=mlp_mixer.GatedMlp
    ),
    "convmixer": partial(convmixer.ConvMixer, dim=16, depth=3, patch_size=4),
    "metaformer": partial(metaformer.MetaFormer, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    "focalnet-timm": partial(focalnet.FocalNet, depths=(1, 1, 1, 1), embed_dim=8),
}
"""Networks whose sizes `create_model` does not let one choose."""


def _from_timm(name: str, size: int, options: dict[str, Any]) -> Network:
    return Network(timm.create_model(name, num_classes=CLASSES, **options), size)


def of_timm() -> dict[str, Callable[[], Network]]:
    named = {name: partial(_from_timm, name, size, options) for name, (size, options) in TIMM.items()}
    return named | {name: partial(_of_class, make) for name, make in OF_CLASS.items()}


def _of_class(make: Callable[..., nn.Module]) -> Network:
    return Network(make(num_classes=CLASSES), 32)


def _swin() -> nn.Module:
    return tv.SwinTransformer([4, 4], 16, [1, 1], [2, 2], [2, 2], num_classes=CLASSES)


def _swin_v2() -> nn.Module:
    block = tv.swin_transformer.SwinTransformerBlockV2
    merging = tv.swin_transformer.PatchMergingV2
    return tv.SwinTransformer(
        [4, 4], 16, [1, 1], [2, 2], [2, 2], num_classes=CLASSES, block=block, downsample_layer=merging
    )


def _convnext() -> nn.Module:
    setting = [tv.convnext.CNBlockConfig(8, 16, 1), tv.convnext.CNBlockConfig(16, None, 2)]
    return tv.ConvNeXt(setting, stochastic_depth_prob=0.2, num_classes=CLASSES)


TORCHVISION: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "VisionTransformer": (16, lambda: VisionTransformer(16, 8, 3, 2, 16, 32, num_classes=CLASSES)),
    "SwinTransformer": (32, _swin), "SwinTransformer V2": (32, _swin_v2), "ConvNeXt": (32, _convnext),

    "DenseNet": (32, lambda: tv.DenseNet(4, (1, 1, 1), 8, num_classes=CLASSES)),
    "MobileNetV2": (32, lambda: tv.mobilenet_v2(width_mult=0.25, num_classes=CLASSES)),
    "MobileNetV3": (32, lambda: tv.mobilenet_v3_small(width_mult=0.5, num_classes=CLASSES)),
    "MNASNet": (32, lambda: tv.mnasnet0_5(num_classes=CLASSES)),
    "ShuffleNetV2": (32, lambda: tv.shufflenet_v2_x0_5(num_classes=CLASSES)),
    "SqueezeNet": (32, lambda: tv.squeezenet1_1(num_classes=CLASSES)),
    "MaxVit": (32, lambda: tv.MaxVit((32, 32), 8, 2, [8, 16], [8, 8], 8, 0.1, num_classes=CLASSES)),
}  # fmt: skip


def of_torchvision() -> dict[str, Callable[[], Network]]:
    return {name: partial(lambda size, make: Network(make(), size), *entry) for name, entry in TORCHVISION.items()}


FAMILIES: dict[str, Callable[[], dict[str, Callable[[], Network]]]] = {
    "text": text, "vision": vision, "timm": of_timm, "torchvision": of_torchvision,
}  # fmt: skip
