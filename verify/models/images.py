"""Models of images as people write them, and models of torchvision and timm, which `make zoo` installs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verify.models.specimens import WIDTH, Specimen, classes, cross_entropy


class BasicBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Double(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        pairs = pairwise((before, after, after))
        super().__init__(
            *(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU()) for a, b in pairs)
        )


class UNet(nn.Module):
    """Images (B, 3, 16, 16) -> (B, 3, 16, 16), with skip connections from the way down to the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down1, self.down2 = Double(3, 8), Double(8, 16), Double(16, 16)
        self.up1, self.up2, self.outc = Double(32, 8), Double(16, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.inc(x)
        b = self.down1(F.max_pool2d(a, 2))
        c = self.down2(F.max_pool2d(b, 2))
        x = self.up1(torch.cat((b, F.interpolate(c, scale_factor=2)), 1))
        return self.outc(self.up2(torch.cat((a, F.interpolate(x, scale_factor=2)), 1)))


class DiTBlock(nn.Module):
    """A block with adaLN-Zero: the condition gives shifts, scales and gates of both halves, which start at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.qkv, self.proj, self.heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), 4
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        nn.init.zeros_(self.adaLN_modulation[1].weight)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).unsqueeze(1).chunk(6, -1)
        h = self.norm1(x) * (1 + scale1) + shift1
        B, N, C = h.shape
        q, k, v = self.qkv(h).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C)
        x = x + gate1 * self.proj(y)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """(noised image (B, 3, 8, 8), time (B,), class (B,)) -> noise, by patches of 2 x 2."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.pos = nn.Conv2d(3, WIDTH, 2, 2), nn.Parameter(torch.randn(1, 16, WIDTH) * 0.02)
        self.time = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.label, self.blocks = nn.Embedding(5, WIDTH), nn.ModuleList(DiTBlock() for _ in range(3))
        self.norm, self.out = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(-torch.arange(8, dtype=t.dtype, device=t.device))
        c = self.time(torch.cat((angles.cos(), angles.sin()), -1)) + self.label(y)
        h = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        for block in self.blocks:
            h = block(h, c)
        return F.pixel_shuffle(self.out(self.norm(h)).transpose(1, 2).unflatten(-1, (4, 4)), 2)


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, WIDTH, 4, 4), nn.Sequential(*(MixerBlock() for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x).flatten(2).transpose(1, 2))).mean(1))


class Autoencoder(nn.Module):
    """Strided convolutions, then transposed ones: two children that are called in order."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def _to_images(side: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def sample(rows: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        first, second = (torch.randn(rows, 3, side, side, generator=draw) for _ in range(2))
        return first, second

    return sample


def _noised(rows: int, draw: torch.Generator) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    noise = torch.randn(rows, 3, 8, 8, generator=draw)
    x, t = torch.randn(rows, 3, 8, 8, generator=draw), torch.rand(rows, generator=draw)
    mixed = x * (1 - t)[:, None, None, None] + noise * t[:, None, None, None]
    return (mixed, t, torch.randint(5, (rows,), generator=draw)), noise


def _torchvision() -> dict[str, Callable[[], nn.Module]]:
    from torchvision.models import resnet, shufflenetv2, swin_transformer, vision_transformer

    def vit() -> nn.Module:
        return vision_transformer.VisionTransformer(16, 4, 2, 4, WIDTH, 2 * WIDTH, num_classes=5)

    def swin() -> nn.Module:
        sizes = {"depths": [2, 2], "num_heads": [2, 4], "window_size": [2, 2]}
        return swin_transformer.SwinTransformer([2, 2], 16, **sizes, stochastic_depth_prob=0.0, num_classes=5)

    return {
        "tv_vit": vit,
        "tv_swin": swin,
        "tv_resnet": lambda: resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=5),
        "tv_shufflenet": lambda: shufflenetv2.ShuffleNetV2([1, 1, 1], [8, 16, 16, 16, 32], num_classes=5),
    }


def _timm() -> dict[str, Callable[[], nn.Module]]:
    import timm
    from timm.models.mlp_mixer import MlpMixer

    def made(name: str, **sizes: object) -> Callable[[], nn.Module]:
        return lambda: timm.create_model(name, num_classes=5, **sizes).train()  # type: ignore[no-any-return]

    patches = {"img_size": 16, "patch_size": 4, "embed_dim": WIDTH, "depth": 2, "num_heads": 4}
    return {
        "timm_vit": made("vit_tiny_patch16_224", **patches),
        "timm_convnext": made("convnext_atto", dims=(8, 16, 16, 32), depths=(1, 1, 1, 1)),
        "timm_mixer": lambda: MlpMixer(5, img_size=16, patch_size=4, num_blocks=2, embed_dim=WIDTH),
    }


IMAGES: dict[str, Specimen] = {
    "resnet": Specimen(ResNet, classes(3, 16, 16), cross_entropy),
    "unet": Specimen(UNet, _to_images(16), F.mse_loss),
    "dit": Specimen(DiT, _noised, F.mse_loss),
    "mixer": Specimen(Mixer, classes(3, 16, 16), cross_entropy),
    "autoencoder": Specimen(Autoencoder, _to_images(16), F.mse_loss),
}


_OPERATIONS = torch.library.Library("torchvision", "FRAGMENT")


def _missing() -> Iterator[str]:
    """Return the libraries, of torchvision and timm, that cannot be imported."""
    for name in ("torchvision", "timm"):
        try:
            import_module(name)
        except ImportError:
            yield name
        except RuntimeError:
            # torchvision may be built for another device than this torch. Then it finds none of its kernels, and its
            # import fails at two of them. No model here needs a kernel, so define these two.
            for operation in ("nms", "qnms"):
                _OPERATIONS.define(f"{operation}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            import_module(name)


# `make zoo` installs both there. The folder is on the path only while they are imported: transformers imports any
# torchvision that it sees, even one whose import fails.
sys.path.append(str(Path(sys.prefix) / "image-models"))
MISSING = tuple(_missing())
"""Packages that cannot be imported. Their architectures are left out, and the result says so."""
sys.path.pop()

if "torchvision" not in MISSING:
    IMAGES |= {name: Specimen(make, classes(3, 16, 16), cross_entropy) for name, make in _torchvision().items()}
if "timm" not in MISSING:
    # Three times halved, after patches of four.
    sizes = {"timm_convnext": 32}
    IMAGES |= {
        name: Specimen(make, classes(3, sizes.get(name, 16), sizes.get(name, 16)), cross_entropy)
        for name, make in _timm().items()
    }
